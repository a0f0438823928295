package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
)

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// HostStatus is what can be seen of a host from outside.
type HostStatus struct {
	Host
	PID       int  // of the daemon; 0 = not running
	Processes int  // all of the host
	Plugged   bool // cable
	Frozen    bool
	Ready     string // replicas: "yes" or why not
	RSS       int64  // of the daemon, bytes
}

// Status looks at every host.
func (l *Lab) Status(ctx context.Context) []HostStatus {
	var out []HostStatus
	for _, h := range l.Config.Hosts {
		s := HostStatus{Host: h, PID: h.daemonPID(), Processes: len(processes(h.CgroupPath())), Plugged: h.connected(), Frozen: frozen(h.CgroupPath())}
		if s.PID != 0 {
			s.RSS = rss(s.PID)
		}
		if h.Role == RoleControlPlane {
			s.Ready = "yes"
			if err := ready(ctx, h); err != nil {
				s.Ready = "no: " + firstLine(err.Error())
			}
		}
		out = append(out, s)
	}
	return out
}

// PrintStatus writes an aligned table.
func PrintStatus(w io.Writer, hosts []HostStatus) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "HOST\tROLE\tIP\tDAEMON\tPROCESSES\tRSS\tSTATE\tREADY")
	for _, h := range hosts {
		daemon, state, ready := "stopped", "ok", h.Ready
		if h.PID != 0 {
			daemon = fmt.Sprintf("pid %d", h.PID)
		}
		switch {
		case h.Processes == 0:
			state = "down"
		case h.Frozen:
			state = "paused"
		case !h.Plugged:
			state = "partitioned"
		}
		if ready == "" {
			ready = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d MiB\t%s\t%s\n", h.Name, h.Role, h.nodeIPs(), daemon, h.Processes, h.RSS>>20, state, ready)
	}
	return t.Flush()
}

func frozen(path string) bool {
	file, want := cgroupMount+"/freezer"+path+"/freezer.state", "FROZEN"
	if unified() {
		file, want = cgroupMount+path+"/cgroup.freeze", "1"
	}
	raw, err := os.ReadFile(file)
	return err == nil && strings.TrimSpace(string(raw)) == want
}

func rss(pid int) int64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(raw), &size, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
