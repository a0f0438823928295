package procfs

import (
	"os"

	"keelson.dev/keelson/test/bench/figures"
)

// Meter tells what a measure cost: the CPU seconds of processes and of groups of
// them, of this process, and the share of the machine that was busy.
type Meter struct {
	Processes map[string]int    // name → pid
	Groups    map[string]string // name → cgroup

	// Whole names those that, without overlap, are everything that is measured
	// beside this process. What else the machine did is then told as Others.
	Whole []string
}

// Self is the name of this process among the costs.
const Self = "bench"

// Run runs a measure and adds its cost to the record. A process that cannot be
// read, before or after, is left out: it was not there all the time.
func (m Meter) Run(r *figures.Record, measure func() error) error {
	before := m.read()
	busy0, total0, err0 := Host()
	err := measure()
	busy1, total1, err1 := Host()
	if r.CPU == nil {
		r.CPU = map[string]float64{}
	}
	for name, after := range m.read() {
		if was, ok := before[name]; ok {
			r.CPU[name] = after - was
		}
	}
	if err0 == nil && err1 == nil && total1 > total0 {
		r.Busy = (busy1 - busy0) / (total1 - total0)
		if len(m.Whole) > 0 {
			r.Others = others(r.CPU, m.Whole, busy1-busy0, total1-total0)
		}
	}
	return err
}

// others is the share of the machine that was busy with what is not measured.
func others(cpu map[string]float64, whole []string, busyTicks, totalTicks float64) float64 {
	ours := cpu[Self]
	for _, name := range whole {
		ours += cpu[name]
	}
	return max(0, busyTicks-ours*ticksPerSecond) / totalTicks
}

func (m Meter) read() map[string]float64 {
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
