package procfs

import (
	"os"

	"keelson.dev/keelson/test/bench/figures"
)

// Meter measures the cost of a measurement: the CPU seconds of processes, of cgroups and of this
// process, and the busy share of the machine.
type Meter struct {
	Processes map[string]int    // PID by name
	Groups    map[string]string // cgroup path by name

	// Whole has the names that together, without overlap, cover everything that is measured besides
	// this process. If it is set, Record.Others has the rest of the machine's work.
	Whole []string
}

// Self is the name of this process in Record.CPU.
const Self = "bench"

// Run calls measure and adds its cost to the record r. It omits a process that cannot be read
// before or after measure, because the process did not exist all the time.
func (m Meter) Run(r *figures.Record, measure func() error) error {
	before := m.readCPU()
	busy0, total0, err0 := Host()
	err := measure()
	busy1, total1, err1 := Host()
	if r.CPU == nil {
		r.CPU = map[string]float64{}
	}
	for name, after := range m.readCPU() {
		if was, ok := before[name]; ok {
			r.CPU[name] = after - was
		}
	}
	if err0 == nil && err1 == nil && total1 > total0 {
		r.Busy = (busy1 - busy0) / (total1 - total0)
		if len(m.Whole) > 0 {
			r.Others = otherWorkShare(r.CPU, m.Whole, busy1-busy0, total1-total0)
		}
	}
	return err
}

// otherWorkShare returns the share of the machine that was busy with work outside of the
// measurement. cpu are CPU seconds by name, whole the names that together cover the measured
// processes.
func otherWorkShare(cpu map[string]float64, whole []string, busyTicks, totalTicks float64) float64 {
	ours := cpu[Self]
	for _, name := range whole {
		ours += cpu[name]
	}
	return max(0, busyTicks-ours*ticksPerSecond) / totalTicks
}

func (m Meter) readCPU() map[string]float64 {
	out := map[string]float64{}
	for name, pid := range m.Processes {
		if v, err := CPU(pid); err == nil {
			out[name] = v
		}
	}
	for name, path := range m.Groups {
		if v, err := GroupCPU(path); err == nil {
			out[name] = v
		}
	}
	if v, err := CPU(os.Getpid()); err == nil {
		out[Self] = v
	}
	return out
}
