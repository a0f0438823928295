package kctl

import (
	"cmp"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/verb"
)

func statusCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the replicas, the leader, the store and the alarms",
		Long: "Show the replicas, the leader, the store and the alarms. LAG is the number of committed log entries\n" +
			"that a replica has not applied yet.",
		Example: "  kctl cluster status\n  kctl cluster status -o json",
		Args:    cobra.NoArgs,
	}
	output := outputFlag(c)
	c.RunE = func(*cobra.Command, []string) error {
		return callAndPrint(f, streams, *output, "GET", api.PathClusterStatus, nil, new(api.ClusterStatus), printStatus)
	}
	return c
}

// printStatus writes cluster status s to w as text: the cluster, its store, its alarms and its
// replicas.
func printStatus(w io.Writer, s api.ClusterStatus) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "cluster\t%s (%s), answered by %s\n", s.Cluster, s.ID, s.Answered)
	if s.Incarnation > 0 {
		fmt.Fprintf(t, "identity\tsince the recovery or restore of %s\n", formatTimestamp(int64(s.Incarnation)))
	}
	fmt.Fprintf(t, "leader\t%s in term %d, revision %d, %d log entries committed\n", cmp.Or(s.Leader, "none"), s.Term,
		s.Revision, s.CommitIndex)
	if s.Leader == "" {
		fmt.Fprintf(t, "NO LEADER\t%s\n", describeLostLeader(s.Members))
	}
	fmt.Fprintf(t, "store\t%d keys, %s; history %s since revision %d\n", s.Keys, formatSize(s.Bytes),
		formatSize(s.HistoryBytes), s.Compacted)
	quota := "no quota"
	if s.Quota > 0 {
		quota = fmt.Sprintf("%.1f%% of %s", 100*float64(s.Bytes+s.HistoryBytes)/float64(s.Quota), formatSize(s.Quota))
	}
	fmt.Fprintf(t, "quota\t%s\n", quota)
	fmt.Fprintf(t, "level\t%d%s\n", s.FeatureLevel, describeLevelChange(s))
	if made := describeBackups(s.Members, time.Now()); made != "" {
		fmt.Fprintf(t, "backups\t%s\n", made)
	}
	if a := s.Autopilot; a != nil {
		fmt.Fprintf(t, "autopilot\treplaces a voter that has not answered for %s; %s\n",
			time.Duration(a.After)*time.Millisecond, a.State)
		for _, d := range a.Done {
			fmt.Fprintf(t, "\t%s has the vote of %s since %s\n", d.Standby, d.Dead, formatTimestamp(d.At))
		}
	}
	if len(s.Alarms) == 0 {
		fmt.Fprintf(t, "alarms\tnone\n")
	}
	for _, a := range s.Alarms {
		about := ""
		if a.Member != "" {
			about = " of " + a.Member
		}
		fmt.Fprintf(t, "ALARM\t%s%s since %s: %s\n", a.Kind, about, formatTimestamp(a.Since), a.Message)
		fmt.Fprintf(t, "remedy\t%s\n", a.Remedy)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return printMembers(w, s.Members)
}

// describeBackups returns a text that shows, for each replica, the age of its last scheduled backup
// and the time of its next one. It returns "" if no replica has a backup schedule.
func describeBackups(members []api.ClusterMember, now time.Time) string {
	var out []string
	for _, m := range members {
		switch b := m.Backups; {
		case b == nil:
		case b.Last == 0:
			out = append(out, m.Name+" none yet")
		default:
			out = append(out, fmt.Sprintf("%s %s, next %s", m.Name, formatAge(now.Sub(time.UnixMilli(b.Last))),
				formatTimestamp(b.Next)))
		}
	}
	return strings.Join(out, "; ")
}

// describeLevelChange returns a text with the feature level to which the cluster will rise next,
// and the replicas that do not support it yet. It returns "" if no replica supports a higher level
// than the cluster has.
func describeLevelChange(s api.ClusterStatus) string {
	var best uint32
	for _, m := range s.Members {
		best = max(best, m.FeatureLevel)
	}
	if best <= s.FeatureLevel {
		return ""
	}
	var below []string
	for _, m := range s.Members {
		if m.FeatureLevel < best {
			below = append(below, m.Name)
		}
	}
	if len(below) == 0 {
		return fmt.Sprintf("; about to be %d", best)
	}
	return fmt.Sprintf("; %d waits for %s", best, strings.Join(below, ", "))
}

// describeLostLeader returns a text for the status of a cluster without a leader. It explains
// whether the reachable voters are a quorum and can elect a leader.
func describeLostLeader(members []api.ClusterMember) string {
	voters, answer := 0, 0
	for _, m := range members {
		if m.Voter {
			voters++
			if m.Version != "" { // only a reachable member reports its version
				answer++
			}
		}
	}
	if need := voters/2 + 1; answer < need {
		return fmt.Sprintf("of %d voters %d answer and %d are needed: nothing can be written. Start the others; if "+
			"their disks are\n"+
			"\tlost for good, see 'keelson-controlplane recover --help'", voters, answer, need)
	}
	return "the replicas elect one: ask again in a second"
}

// printMembers writes a table of the replicas to w, sorted by name. The API returns them in the
// order in which they became voters.
func printMembers(w io.Writer, members []api.ClusterMember) error {
	members = slices.SortedFunc(slices.Values(members), func(a, b api.ClusterMember) int {
		return strings.Compare(a.Name, b.Name)
	})
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "REPLICA\tROLE\tADDRESS\tAPPLIED\tLAG\tHEARD\tDISK\tWATCHERS\tVERSION\tREADY")
	for _, m := range members {
		applied, lag, heard := "-", "-", "never"
		if m.Applied > 0 {
			applied, lag = fmt.Sprint(m.Applied), fmt.Sprint(m.Lag)
		}
		if m.Contact >= 0 {
			heard = formatAge(time.Duration(m.Contact) * time.Millisecond)
		}
		disk, watchers := "-", "-"
		if m.Version != "" { // only a reachable member reports its version
			disk, watchers = formatSize(m.Disk), fmt.Sprint(m.Watchers)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Name, memberRole(m), m.Address, applied, lag,
			heard, disk, watchers, cmp.Or(m.Version, "-"), m.Ready)
	}
	return t.Flush()
}

func memberRole(m api.ClusterMember) string {
	switch {
	case m.Leader:
		return "leader"
	case m.Voter:
		return "follower"
	case m.Standby:
		return "standby"
	}
	return "learner"
}

// formatSize formats n, a number of bytes, with a binary unit such as KiB.
func formatSize(n int64) string {
	f, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for f >= 1024 && len(units) > 1 {
		f, units = f/1024, units[1:]
	}
	if units[0] == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[0])
}

// formatAge formats an age as "5m0s ago". An age below a second is "now".
func formatAge(d time.Duration) string {
	switch {
	case d < time.Second:
		return "now"
	case d < 10*time.Minute:
		return d.Round(time.Second).String() + " ago"
	}
	return d.Round(time.Minute).String() + " ago"
}

func memberCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "member",
		Short: "Manage the members of the raft cluster",
		Long: "Manage the members of the raft cluster, which are the control-plane replicas. A new member joins\n" +
			"with 'keelson-controlplane join' on its own machine. The token for it is created by\n" +
			"'kctl cluster token create --role controlplane'.",
		Example: "  kctl cluster member list\n  kctl cluster member remove cp2",
	}
	list := &cobra.Command{
		Use: "list", Short: "List the members of the raft cluster", Args: cobra.NoArgs,
		Example: "  kctl cluster member list\n  kctl cluster member list -o json",
	}
	output := outputFlag(list)
	list.RunE = func(*cobra.Command, []string) error {
		return callAndPrint(f, streams, *output, "GET", api.PathClusterMembers, nil,
			new([]api.ClusterMember), printMembers)
	}
	remove := &cobra.Command{
		Use: "remove NAME", Short: "Remove a replica from the raft cluster permanently", Args: cobra.ExactArgs(1),
		Long: "Remove a replica from the raft cluster permanently.\n" +
			"\n" +
			"The command is refused if the reachable replicas would no longer be a quorum. Therefore remove\n" +
			"an unreachable replica before a reachable one. If the quorum is already lost, see\n" +
			"'kctl cluster recover --help'. Do not remove a replica that is only stopped for a while. If only\n" +
			"its disk was lost, see 'kctl cluster rebuild --help'.\n" +
			"\n" +
			"The certificate of a removed replica is rejected. However, every replica has a copy of the\n" +
			"cluster's CA and keys on its disk. If that disk may be read by others, rotate each of them with\n" +
			"'kctl cluster rotate'. 'kctl cluster certs' shows the keys of removed replicas that are still\n" +
			"valid. See docs/how-to/respond-to-a-leaked-key.md.",
		Example: "  kctl cluster member remove cp2",
		RunE: func(_ *cobra.Command, args []string) error {
			var answer map[string]string
			if err := callAPI(f, "DELETE", api.PathClusterMembers+"/"+url.PathEscape(args[0]), nil, &answer); err !=
				nil {
				return err
			}
			fmt.Fprintf(streams.Out, "%s is no member any more. Stop its daemon; its data folder can go.\n", args[0])
			fmt.Fprintln(streams.Out, "It has had the cluster's keys. If its disk may be in wrong hands: 'kctl "+
				"cluster rotate cluster-ca', then peers-ca,\n"+
				"encryption-key and service-account-key. 'kctl cluster certs' shows which of them are good still.")
			return nil
		},
	}
	remove.ValidArgsFunction = verb.CompleteArgument(memberNames(f))
	return verb.NewGroup(c, list, remove)
}

func transferLeaderCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	to := ""
	c := &cobra.Command{
		Use:   "transfer-leader",
		Short: "Transfer leadership to another replica",
		Long: "Transfer leadership to another replica, for example before maintenance of the leader's machine.\n" +
			"No request fails. Writes pause for some milliseconds.",
		Example: "  kctl cluster transfer-leader\n  kctl cluster transfer-leader --to cp2",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var r api.ClusterStepDownResult
			if err := callAPI(f, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: to}, &r); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "%s leads now, after %s\n", r.To, cmp.Or(r.From, "no leader"))
			return nil
		},
	}
	c.Flags().StringVar(&to, "to", "", "name of the replica that becomes the leader (default: the replica with the "+
		"most recent log)")
	verb.CompleteFlag(c, "to", memberNames(f))
	return c
}

func compactCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	revision := uint64(0)
	c := &cobra.Command{
		Use:   "compact",
		Short: "Delete old revisions from the watch history",
		Long: "Delete old revisions from the watch history now. The store also does this automatically, by age, by\n" +
			"number of revisions, and when its quota is used up. Watches that need a deleted revision list\n" +
			"their objects again.",
		Example: "  kctl cluster compact\n  kctl cluster compact --revision 120000",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var r api.ClusterCompactResult
			if err := callAPI(f, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: revision}, &r); err !=
				nil {
				return err
			}
			fmt.Fprintf(streams.Out, "history up to revision %d is forgotten; what is left of it is %s\n", r.Compacted,
				formatSize(r.HistoryBytes))
			return nil
		},
	}
	c.Flags().Uint64Var(&revision, "revision", 0, "last revision to delete (default: all but the current one)")
	return c
}

func revokeCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke node/NAME",
		Short: "Revoke the certificates of a node",
		Long: "Revoke the certificates of a node. Its connections and API requests end within seconds on every\n" +
			"replica, and it cannot renew its certificates. Its pods keep running on the machine, but the\n" +
			"cluster replaces them as it replaces the pods of a lost node. Deleting the Node has the same\n" +
			"effect. The machine can join again with a token of\n" +
			"'kctl cluster token create --names NAME --replace'.",
		Example:           "  kctl cluster revoke node/w1",
		ValidArgsFunction: verb.CompleteArgument(nodeNames(f)),
		Args:              cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			name, ok := strings.CutPrefix(args[0], "node/")
			if !ok || name == "" {
				return fmt.Errorf("%q is not a node: want node/NAME, such as node/w1", args[0])
			}
			var answer api.ClusterRevoke
			if err := callAPI(f, "POST", api.PathClusterRevoke, api.ClusterRevoke{Node: name}, &answer); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "node/%s is revoked: what it was given before proves nothing any more.\n", name)
			return nil
		},
	}
}
