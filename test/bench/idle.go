package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

const (
	mebi       = 1 << 20
	idleWindow = 10 * time.Second
)

// measuredRoles lists the daemons whose idle cost is measured.
var measuredRoles = []struct {
	role  lab.Role
	label string
}{{lab.RoleControlPlane, "controlplane"}, {lab.RoleWorker, "agent"}}

// measureIdle measures the CPU time and memory of the daemons in an idle cluster.
func (b *benchmarks) measureIdle(ctx context.Context, c *cluster) error {
	b.tally.LogProgress("idle for %s", idleWindow)
	rec, err := b.runMeasurement("idle", map[string]any{"seconds": idleWindow.Seconds()},
		func() (map[string]float64, error) {
			return map[string]float64{}, wait.Delay(ctx, idleWindow)
		})
	if err != nil {
		return err
	}
	for _, r := range measuredRoles {
		for _, d := range c.daemon[r.role] {
			b.tally.AddRow(figures.Row{
				Measure: "idle CPU of " + r.label + " " + d.host + ", share of a core", Key: r.label + " cpu",
				Figure: 100 * rec.CPU[d.host] / idleWindow.Seconds(), Unit: "%",
				Note: fmt.Sprintf("busy %.0f%%", 100*rec.Busy),
			})
		}
	}
	n := &podLoad{run: b, cluster: c}
	n.recordDaemonMemory(", idle", "", map[string]any{"pods": 0})
	return nil
}

// recordDaemonMemory adds a row with the resident memory of every daemon, with anonymous and
// file-backed memory apart. The row's key is the daemon's label and suffix. when is the time of the
// measurement in texts.
func (n *podLoad) recordDaemonMemory(when, suffix string, params map[string]any) {
	values := map[string]float64{}
	for _, r := range measuredRoles {
		for _, d := range n.cluster.daemon[r.role] {
			m, err := procfs.ReadMemory(d.pid)
			if err != nil {
				n.run.tally.LogProgress("%s %s has exited: %v", r.label, d.host, err)
				continue
			}
			anonymous, file := m.Anonymous/mebi, m.File/mebi
			values[d.host+" anonymous_mib"], values[d.host+" file_mib"] = anonymous, file
			n.run.tally.AddRow(figures.Row{
				Measure: "RSS of " + r.label + " " + d.host + when, Key: r.label + suffix,
				Figure: anonymous + file, Unit: "MiB",
				Note: fmt.Sprintf("anonymous %.1f, file-backed %.1f", anonymous, file),
			})
		}
	}
	n.run.tally.Records = append(n.run.tally.Records,
		figures.Record{Measure: "memory of daemons", Params: params, Values: values})
}

// recordPodMemory adds the memory overhead of a running pod: the proportional set size (PSS) of its
// shim and pause process, as the median of the pods.
func (n *podLoad) recordPodMemory(node string) error {
	h, err := n.cluster.loan.Lab.Host(node)
	if err != nil {
		return err
	}
	processes, err := procfs.ProcessesBelow(h.CgroupPath())
	if err != nil {
		return err
	}
	pods := podProcesses(processes)
	var both, shims []float64
	for _, p := range pods {
		shim, err1 := procfs.PSS(p.shim)
		pause, err2 := procfs.PSS(p.pause)
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("memory of a pod's shim %d and pause %d: %w", p.shim, p.pause, err)
		}
		shims, both = append(shims, shim/mebi), append(both, (shim+pause)/mebi)
	}
	if len(both) < n.run.options.burstPods {
		return fmt.Errorf("%d pods run on %s, but it has %d pairs of shim and pause", n.run.options.burstPods,
			node, len(both))
	}
	values := map[string]float64{"n": float64(len(both)), "pss_mib": figures.Quantile(both, 0.5),
		"shim_pss_mib": figures.Quantile(shims, 0.5)}
	n.run.tally.Records = append(n.run.tally.Records, figures.Record{Measure: "memory of a pod",
		Params: map[string]any{"pods": n.run.options.burstPods},
		Values: values})
	n.run.tally.AddRow(figures.Row{
		Measure: "PSS of shim and pause, median of pods", Key: "pod pss", Figure: values["pss_mib"], Unit: "MiB",
		Note: fmt.Sprintf("shim %.2f, %d pods", values["shim_pss_mib"], len(both)),
	})
	return nil
}

// Process names of a pod's own processes.
const (
	shimName  = "keelson-shim"
	pauseName = "keelson-pause"
)

type podProcess struct{ shim, pause int }

// podProcesses returns each pause process with the shim that is its parent.
func podProcesses(processes []procfs.Process) []podProcess {
	var out []podProcess
	for _, p := range processes {
		if p.Name != pauseName {
			continue
		}
		if slices.ContainsFunc(processes, func(s procfs.Process) bool {
			return s.PID == p.Parent && s.Name == shimName
		}) {
			out = append(out, podProcess{shim: p.Parent, pause: p.PID})
		}
	}
	return out
}
