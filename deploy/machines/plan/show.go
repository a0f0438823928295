package plan

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"keelson.dev/keelson/deploy/machines"
)

// String returns a description of the step for users, without the machine and the reasons.
func (s Step) String() string {
	switch s.Do {
	case Upload:
		var all []string
		for _, f := range s.Files {
			all = append(all, fmt.Sprintf("%s (%s)", f.Name, formatBytes(f.Size)))
		}
		return "upload " + strings.Join(all, ", ")
	case ControlPlane:
		switch s.Start {
		case Init:
			return "make the cluster: init " + strings.Join(s.Flags, " ")
		case Join:
			return "join as " + replicaWord(s.Standby)
		}
		return "change the replica"
	case Agent:
		if s.Start == Join {
			return "join as a node"
		}
		return "change the agent"
	case Mark:
		return "labels and taints of the node"
	case Drain:
		return "drain the node"
	case Cordon:
		return "cordon the node"
	case Leave:
		return "leave the raft cluster"
	case Uninstall:
		return "uninstall"
	case DeleteNode:
		return "delete the node"
	}
	return string(s.Do)
}

// Show prints steps and their reasons, grouped by machine.
func Show(w io.Writer, steps []Step) {
	last := ""
	for _, s := range steps {
		name := s.Machine
		if name == last {
			name = ""
		}
		last = s.Machine
		fmt.Fprintf(w, "%-12s  %s\n", name, s)
		for _, why := range s.Why {
			if s.Start != "" && strings.HasPrefix(why, "joins as") ||
				s.Start == Init && strings.HasPrefix(why, "makes the cluster") {
				continue // the description of the step already contains this reason
			}
			fmt.Fprintf(w, "%-12s    %s\n", "", why)
		}
	}
}

// ShowFindings prints each finding as a warning or an error, and its remedy in the next line.
func ShowFindings(w io.Writer, all []Finding) {
	for _, f := range all {
		word, of := "warning", f.Machine
		if f.Blocking {
			word = "ERROR"
		}
		if of != "" {
			of += ": "
		}
		fmt.Fprintf(w, "%-7s  %s%s\n", word, of, f.What)
		if f.Remedy != "" {
			fmt.Fprintf(w, "%-7s  -> %s\n", "", f.Remedy)
		}
	}
}

// ShowMachines prints a table of the observed machines and their facts. It omits machines that are
// not in seen.
func ShowMachines(w io.Writer, c machines.Cluster, seen map[string]Observation) {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "MACHINE\tADDRESS\tROLES\tARCH\tKERNEL\tMEMORY\tROOM\tFSYNC\tCLOCK\tHAS")
	for _, h := range c.Hosts {
		one, asked := seen[h.Name]
		if !asked {
			continue
		}
		var roles []string
		for _, r := range h.Roles {
			roles = append(roles, string(r))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t", h.Name, h.Address, strings.Join(roles, ","))
		if one.Err != nil {
			fmt.Fprintln(t, "-\t-\t-\t-\t-\t-\t(not reached)")
			continue
		}
		f := one.Facts
		sync := "-"
		if f.SyncLatency > 0 {
			sync = f.SyncLatency.Round(100 * time.Microsecond).String()
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", printable(f.Arch), printable(f.Kernel), formatBytes(f.Memory),
			formatBytes(f.FreeBytes), sync, formatSkew(f), describeInstalled(f))
	}
	t.Flush()
}

func formatSkew(f machines.Facts) string {
	if f.Skew.Abs() <= f.SkewError+10*time.Millisecond {
		return "as ours"
	}
	return fmt.Sprintf("%+.2fs", f.Skew.Seconds())
}

// describeInstalled returns a description of the installation on a machine: the release, and
// "replica", "standby", or "node".
func describeInstalled(f machines.Facts) string {
	var all []string
	if f.HasPrograms() {
		version := f.Version[strings.LastIndex(f.Version, " ")+1:]
		if version == "" {
			version = "programs"
		}
		all = append(all, printable(version))
	}
	if f.ReplicaWhole && f.WithoutVote {
		all = append(all, "standby")
	} else if f.ReplicaWhole {
		all = append(all, "replica")
	} else if f.Replica {
		all = append(all, "half a replica")
	}
	if f.Node {
		all = append(all, "node")
	}
	if len(all) == 0 {
		return "nothing"
	}
	return strings.Join(all, ", ")
}
