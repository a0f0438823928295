package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
)

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// HostStatus is the observed state of a host of the lab.
type HostStatus struct {
	Host
	PID       int  // PID of the host's daemon; 0: not running
	Processes int  // number of all processes of the host
	Plugged   bool // false after Partition
	Frozen    bool
	Ready     string // only of replicas: "yes", or "no: " and the reason
	RSS       int64  // resident memory of the host's daemon in bytes
}

// Status returns the observed state of each host, in the order of Config.Hosts.
func (l *Lab) Status(ctx context.Context) []HostStatus {
	var out []HostStatus
	for _, h := range l.Config.Hosts {
		s := HostStatus{Host: h, PID: h.daemonPID(), Processes: len(cgroupPIDs(h.CgroupPath())), Plugged: h.isCableUp(),
			Frozen: isFrozen(h.CgroupPath())}
		if s.PID != 0 {
			s.RSS = residentBytes(s.PID)
		}
		if h.Role == RoleControlPlane {
			s.Ready = "yes"
			if err := checkReady(ctx, h); err != nil {
				s.Ready = "no: " + firstLine(err.Error())
			}
		}
		out = append(out, s)
	}
	return out
}

// PrintStatus prints the states of hosts as a table with aligned columns.
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
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d MiB\t%s\t%s\n", h.Name, h.Role, h.nodeIPs(), daemon, h.Processes,
			h.RSS>>20, state, ready)
	}
	return t.Flush()
}

func isFrozen(path string) bool {
	file, want := cgroupMount+"/freezer"+path+"/freezer.state", "FROZEN"
	if hasCgroupV2Only() {
		file, want = cgroupMount+path+"/cgroup.freeze", "1"
	}
	raw, err := os.ReadFile(file)
	return err == nil && strings.TrimSpace(string(raw)) == want
}

func residentBytes(pid int) int64 {
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
