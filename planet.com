0.0006058724770381584  0.0004951864133522234 : Mass of the planets (in mstar)
89.76214615462479  9.437276456726664 : Semi-major axes
0.008749764681171645  0.6285620510205571 : Eccentricities
70.24030426208247  49.18310524531188 : Inclinaison (deg)
1  1 : is Inclinaison damping?
1  1 : planets feel Disk ?
1  1 : planets feel others ?
0  0 : Accretion onto planets ?
1.66  1.66 : Accretion parameter
0.001  0.001 : Maximum mass of the planet
0.4  0.4 : Smoothing
1.0  1.0 : Region excluded from torque calculation
