package provision

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/upgrade"
	"keelson.dev/keelson/kctl/verb"
)

// upgradeFlags holds the flags that 'kctl lab upgrade' and 'kctl cluster upgrade' have in common.
type upgradeFlags struct {
	goal     upgrade.Goal
	dryRun   bool
	patience time.Duration
}

func (u *upgradeFlags) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&u.goal.Drain, "drain", nil,
		"names of the nodes that are drained before their upgrade, one at a time, or 'all' (default: none, pods "+
			"keep running)")
	f.StringSliceVar(&u.goal.Skip, "skip", nil, "names of the replicas and nodes that are not upgraded")
	f.BoolVar(&u.dryRun, "dry-run", false, "print the steps without running them")
	f.DurationVar(&u.patience, "health-timeout", 2*time.Minute,
		"how long to wait for a replica or node to become healthy after its upgrade")
	verb.AddPreviousFlag(f, "health-timeout", "patience")
}

const upgradeOrder = "Replicas are upgraded one at a time: first those without a vote, last the " +
	"leader, after it has\n" +
	"transferred its leadership. Then the agents are upgraded. Their pods keep running, unless --drain\n" +
	"is given. The upgrade stops at the first replica or node that does not become healthy. Run the\n" +
	"command again to continue.\n" +
	"\n" +
	"A downgrade to an earlier release works in the same way, as long as the feature level has not been\n" +
	"raised. 'kctl cluster status' shows the feature level."

func labUpgrade(streams genericiooptions.IOStreams) *cobra.Command {
	var u upgradeFlags
	dir := ""
	c := &cobra.Command{
		Use:   "upgrade --to DIR",
		Short: "Upgrade the programs of all replicas and workers of the lab",
		Long: "Upgrade all replicas and workers of the lab to the programs of another directory, while the\n" +
			"cluster serves requests.\n" +
			"\n" +
			upgradeOrder,
		Example: "  kctl lab upgrade --to /root/keelson/bin --dry-run\n  kctl lab upgrade --to " +
			"/root/keelson/bin --drain w1,w2",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if dir == "" {
				return errors.New("--to is missing: want the directory of the new programs")
			}
			l, err := openLab(streams)
			if err != nil {
				return err
			}
			ctx, cancel := verb.WithSignals()
			defer cancel()
			if dir, err = filepath.Abs(dir); err != nil {
				return err
			}
			if u.goal.Release, u.goal.Level, err = readRelease(ctx, dir); err != nil {
				return err
			}
			cfg, err := clientcmd.BuildConfigFromFlags("", l.Config.Kubeconfig)
			if err != nil {
				return err
			}
			cs, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			place := func(ctx context.Context, host string) error { return l.Replace(ctx, host, dir) }
			return u.runUpgrade(ctx, &upgradeTarget{clusterClient: &apiClusterClient{cs, streams.Out}, replica: place,
				agent: place}, streams.Out)
		},
	}
	c.Flags().StringVar(&dir, "to", "", "directory of the new programs")
	u.addFlags(c.Flags())
	return c
}

// runUpgrade runs the steps that upgrade cluster s to u.goal, and prints them to out. With
// --dry-run, it only prints the steps.
func (u *upgradeFlags) runUpgrade(ctx context.Context, s *upgradeTarget, out io.Writer) error {
	if u.dryRun {
		now, err := s.ReadState(ctx)
		if err != nil {
			return err
		}
		steps, err := upgrade.Plan(now, u.goal)
		for _, step := range steps {
			fmt.Fprintln(out, step)
		}
		if err == nil && len(steps) == 0 {
			fmt.Fprintln(out, "there is nothing to do")
		}
		return err
	}
	begin := time.Now()
	return upgrade.Run(ctx, s, u.goal, upgrade.Options{Patience: u.patience, Say: func(format string, args ...any) {
		fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}})
}

// versionTimeout is the time limit for running both daemon programs with --version.
const versionTimeout = 20 * time.Second

// readRelease runs the daemon programs in directory dir with --version, and returns their release
// and their feature level.
func readRelease(ctx context.Context, dir string) (release string, level uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	var said [2]string
	for i, name := range []string{"keelson-controlplane", "keelson-agent"} {
		var errs bytes.Buffer
		cmd := exec.CommandContext(ctx, filepath.Join(dir, name), "--version")
		cmd.Stderr = &errs
		raw, err := cmd.Output()
		if err != nil && errs.Len() == 0 {
			return "", 0, err
		}
		said[i] = string(raw)
	}
	release, level, err = parseRelease(said[0], said[1])
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", dir, err)
	}
	return release, level, nil
}

// parseRelease returns the release and the feature level in the --version output of
// keelson-controlplane and keelson-agent. It fails if the two have different releases.
func parseRelease(controlplane, agent string) (release string, level uint32, err error) {
	first, rest, _ := strings.Cut(controlplane, "\n")
	release, ok := strings.CutPrefix(first, "keelson-controlplane version ")
	if !ok || release == "" {
		return "", 0, fmt.Errorf("'keelson-controlplane --version' printed %q, which is not a release: check the "+
			"directory of --to", first)
	}
	digits, ok := strings.CutPrefix(strings.TrimSpace(rest), "feature level ")
	n, err := strconv.ParseUint(digits, 10, 32)
	if !ok || err != nil {
		return "", 0,
			fmt.Errorf("keelson-controlplane of release %s is too old to report its feature level. Upgrade "+
				"one host after the "+
				"other, agents last: see docs/how-to/upgrade-by-hand.md", release)
	}
	ofAgent, ok := strings.CutPrefix(strings.TrimSpace(agent), "keelson-agent version ")
	if !ok || ofAgent != release {
		return "", 0,
			fmt.Errorf("keelson-controlplane is of release %s, and keelson-agent reports %q: want the same release",
				release, strings.TrimSpace(agent))
	}
	return trimVersionPrefix(release), uint32(n), nil
}

// trimVersionPrefix returns release without a leading "v". Only some programs print it.
func trimVersionPrefix(release string) string { return strings.TrimPrefix(release, "v") }

// drainMark is the annotation of a Node that an upgrade drains, or has drained. Its value is
// drainBegun or drainDone, followed by wasCordoned if the node was cordoned before the upgrade.
const (
	drainMark    = api.AnnotationUpgradeDrain
	drainBegun   = "begun"
	drainDone    = "drained"
	wasCordoned  = ",cordoned"
	drainNothing = "" // patchNode removes the annotation
)

// clusterClient is the administrator's access to a cluster during an upgrade: through the API, or
// by running kctl on one of the cluster's machines.
type clusterClient interface {
	// readCluster returns the status of the cluster and its Nodes. The Nodes may contain only the
	// fields that upgradeState and Drain read.
	readCluster(ctx context.Context) (api.ClusterStatus, []v1.Node, error)
	transferLeader(ctx context.Context, to string) error
	mergePatchNode(ctx context.Context, node string, merge []byte) error
	// drainNode evicts all pods of a node, except those of DaemonSets.
	drainNode(ctx context.Context, node string) error
}

// upgradeTarget is the cluster that an upgrade changes. It implements upgrade.Cluster. The function
// replica installs the new keelson-controlplane on a host and restarts it. The function agent does
// the same with keelson-agent.
type upgradeTarget struct {
	clusterClient
	replica, agent func(ctx context.Context, host string) error
}

// ReadState returns the current releases and problems of all replicas and nodes. It may fail while
// a replica restarts.
func (s *upgradeTarget) ReadState(ctx context.Context) (upgrade.State, error) {
	status, nodes, err := s.readCluster(ctx)
	if err != nil {
		return upgrade.State{}, err
	}
	return upgradeState(status, nodes), nil
}

// upgradeState returns the state from which package upgrade determines the next step. It is
// computed from the status and the Nodes of the cluster.
func upgradeState(status api.ClusterStatus, nodes []v1.Node) (s upgrade.State) {
	s.Level = status.FeatureLevel
	if status.Work == api.WorkWaiting {
		s.Busy = "the leader's work has not begun"
	}
	for _, m := range status.Members {
		member := upgrade.Member{Name: m.Name, Release: trimVersionPrefix(m.Version), Voter: m.Voter,
			Leader: m.Name == status.Leader}
		if m.Ready != "yes" {
			member.Problem = strings.TrimPrefix(m.Ready, "no: ")
		}
		for _, a := range status.Alarms {
			if a.Member == m.Name && (a.Kind == "diverged" || a.Kind == "too old") && member.Problem == "" {
				member.Problem = a.Message
			}
		}
		s.Members = append(s.Members, member)
	}
	for i := range nodes {
		n := &nodes[i]
		_, release, _ := strings.Cut(n.Status.NodeInfo.ContainerRuntimeVersion, "://")
		s.Nodes = append(s.Nodes, upgrade.Node{Name: n.Name, Release: trimVersionPrefix(release),
			Problem: nodeProblem(n), Drained: strings.HasPrefix(n.Annotations[drainMark], drainDone)})
	}
	slices.SortFunc(s.Members, func(a, b upgrade.Member) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Nodes, func(a, b upgrade.Node) int { return strings.Compare(a.Name, b.Name) })
	return s
}

// nodeProblem returns the reason why node n is not healthy enough for the upgrade to continue. It
// returns "" if n is healthy enough.
func nodeProblem(n *v1.Node) string {
	ready := false
	for _, c := range n.Status.Conditions {
		switch {
		case c.Type == v1.NodeReady && c.Status == v1.ConditionTrue:
			ready = true
		case c.Type == v1.NodeReady:
			return "it is not Ready: " + c.Message
		case (c.Type == v1.NodeNetworkUnavailable || c.Type == "keelson.dev/Degraded") && c.Status == v1.ConditionTrue:
			return fmt.Sprintf("%s: %s", c.Type, c.Message)
		}
	}
	if !ready {
		return "it does not say whether it is Ready"
	}
	return ""
}

// TransferLeadership makes the replica target the leader of the raft cluster.
func (s *upgradeTarget) TransferLeadership(ctx context.Context, _, target string) error {
	return s.transferLeader(ctx, target)
}

// Replica installs the new keelson-controlplane on the named host and restarts it.
func (s *upgradeTarget) Replica(ctx context.Context, name string) error { return s.replica(ctx, name) }

// Agent installs the new keelson-agent on the host of the given node and restarts it.
func (s *upgradeTarget) Agent(ctx context.Context, node string) error { return s.agent(ctx, node) }

// drainLimit is the time limit for draining one node during an upgrade.
const drainLimit = 15 * time.Minute

// Drain cordons a node, evicts its pods, and records this in the Node's annotation drainMark. If
// the eviction fails, the node is uncordoned, unless it was cordoned before the upgrade.
func (s *upgradeTarget) Drain(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	n, err := s.getNode(ctx, node)
	if err != nil {
		return err
	}
	cordoned, before := cordonedBeforeUpgrade(n), ""
	if cordoned {
		before = wasCordoned
	}
	if err := s.patchNode(ctx, node, true, drainBegun+before); err != nil {
		return fmt.Errorf("cordoning node %s: %w", node, err)
	}
	if err := s.drainNode(ctx, node); err != nil {
		undo := s.patchNode(context.WithoutCancel(ctx), node, cordoned, drainNothing)
		return errors.Join(fmt.Errorf("draining node %s: %w. Drain the node yourself ('kctl drain --help' lists flags "+
			"for such pods), or leave "+
			"it out of --drain", node, err), undo)
	}
	return s.patchNode(ctx, node, true, drainDone+before)
}

func (s *upgradeTarget) getNode(ctx context.Context, name string) (*v1.Node, error) {
	_, nodes, err := s.readCluster(ctx)
	for i := range nodes {
		if nodes[i].Name == name {
			return &nodes[i], nil
		}
	}
	if err == nil {
		err = fmt.Errorf("node %s no longer exists", name)
	}
	return nil, err
}

// cordonedBeforeUpgrade reports whether node n was cordoned before the upgrade drained it. If the
// upgrade has not drained it, it reports whether n is cordoned.
func cordonedBeforeUpgrade(n *v1.Node) bool {
	if mark := n.Annotations[drainMark]; mark != "" {
		return strings.HasSuffix(mark, wasCordoned)
	}
	return n.Spec.Unschedulable
}

// Return undoes Drain: it uncordons the node, unless it was cordoned before the upgrade, and
// removes the Node's annotation drainMark.
func (s *upgradeTarget) Return(ctx context.Context, node string) error {
	n, err := s.getNode(ctx, node)
	if err != nil {
		return err
	}
	return s.patchNode(ctx, node, cordonedBeforeUpgrade(n), drainNothing)
}

// patchNode cordons or uncordons a node, and sets the Node's annotation drainMark to mark. If mark
// is drainNothing, it removes the annotation.
func (s *upgradeTarget) patchNode(ctx context.Context, node string, unschedulable bool, mark string) error {
	value := any(mark)
	if mark == drainNothing {
		value = nil
	}
	raw, err := json.Marshal(map[string]any{
		"spec":     map[string]any{"unschedulable": unschedulable},
		"metadata": map[string]any{"annotations": map[string]any{drainMark: value}},
	})
	if err != nil {
		return err
	}
	return s.mergePatchNode(ctx, node, raw)
}
