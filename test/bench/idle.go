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

// roles are the daemons whose memory and CPU are told.
var roles = []struct {
	role  lab.Role
	label string
}{{lab.RoleControlPlane, "controlplane"}, {lab.RoleWorker, "agent"}}

// idle measures what doing nothing costs.
func (b *bench) idle(ctx context.Context, c *cluster) error {
	b.Say("idle for %s", idleWindow)
	rec, err := b.measure("idle", map[string]any{"seconds": idleWindow.Seconds()}, func() (map[string]float64, error) {
		return map[string]float64{}, wait.Delay(ctx, idleWindow)
	})
	if err != nil {
		return err
	}
	for _, r := range roles {
		for _, d := range c.daemon[r.role] {
			b.Row(figures.Row{
				Measure: "idle CPU of " + r.label + " " + d.host + ", share of a core", Key: r.label + " cpu",
				Figure: 100 * rec.CPU[d.host] / idleWindow.Seconds(), Unit: "%", Note: fmt.Sprintf("busy %.0f%%", 100*rec.Busy),
			})
		}
	}
	n := &nodeLoad{bench: b, cluster: c}
	n.daemonMemory(", idle", "", map[string]any{"pods": 0})
	return nil
}

// daemonMemory adds the resident memory of every daemon, its own and the shared apart.
// The rows' keys are the daemons' names and a suffix.
func (n *nodeLoad) daemonMemory(when, suffix string, params map[string]any) {
	values := map[string]float64{}
	for _, r := range roles {
		for _, d := range n.daemon[r.role] {
			m, err := procfs.ReadMemory(d.pid)
			if err != nil {
				n.Say("%s %s has ended: %v", r.label, d.host, err)
				continue
			}
			anonymous, file := m.Anonymous/mebi, m.File/mebi
			values[d.host+" anonymous_mib"], values[d.host+" file_mib"] = anonymous, file
			n.Row(figures.Row{
				Measure: "RSS of " + r.label + " " + d.host + when, Key: r.label + suffix, Figure: anonymous + file, Unit: "MiB",
				Note: fmt.Sprintf("anonymous %.1f, file-backed %.1f", anonymous, file),
			})
		}
	}
	n.Records = append(n.Records, figures.Record{Measure: "memory of daemons", Params: params, Values: values})
}

// podMemory adds what a running pod costs beside its own processes: the
// proportional share of shim and pause.
func (n *nodeLoad) podMemory(node string) error {
	h, err := n.loan.Host(node)
	if err != nil {
		return err
	}
	processes, err := procfs.Below(h.CgroupPath())
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
	if len(both) < n.burst {
		return fmt.Errorf("%d pods run on %s and %d pairs of shim and pause", n.burst, node, len(both))
	}
	values := map[string]float64{"n": float64(len(both)), "pss_mib": figures.Quantile(both, 0.5), "shim_pss_mib": figures.Quantile(shims, 0.5)}
	n.Records = append(n.Records, figures.Record{Measure: "memory of a pod", Params: map[string]any{"pods": n.burst}, Values: values})
	n.Row(figures.Row{
		Measure: "PSS of shim and pause, median of pods", Key: "pod pss", Figure: values["pss_mib"], Unit: "MiB",
		Note: fmt.Sprintf("shim %.2f, %d pods", values["shim_pss_mib"], len(both)),
	})
	return nil
}

// The names of a pod's own processes, as the kernel shows them.
const (
	shimName  = "keelson-shim"
	pauseName = "keelson-pause"
)

type podProcess struct{ shim, pause int }

// podProcesses pairs each pause with the shim whose child it is.
func podProcesses(processes []procfs.Process) []podProcess {
	var out []podProcess
	for _, p := range processes {
		if p.Name != pauseName {
			continue
		}
		if slices.ContainsFunc(processes, func(s procfs.Process) bool { return s.PID == p.Parent && s.Name == shimName }) {
			out = append(out, podProcess{shim: p.Parent, pause: p.PID})
		}
	}
	return out
}
