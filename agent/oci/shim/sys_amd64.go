package shim

const sysSetns = 308
