package provision

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/execute"
	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/deploy/machines/release"
	"keelson.dev/keelson/deploy/upgrade"
	"keelson.dev/keelson/kctl/verb"
)

// machineUpgrade holds the flags of 'kctl cluster upgrade'.
type machineUpgrade struct {
	upgradeFlags
	file, to string
}

// UpgradeCommand returns the command 'kctl cluster upgrade', which upgrades the machines of a
// cluster file to another release.
func UpgradeCommand(streams genericiooptions.IOStreams) *cobra.Command {
	var u machineUpgrade
	c := &cobra.Command{
		Use:   "upgrade --to RELEASE",
		Short: "Upgrade the machines of a cluster file to another release, by ssh",
		Long: "Upgrade the machines of a cluster file to another release, by ssh, while the cluster serves\n" +
			"requests. All machines are checked first, and the release is copied to all of them.\n" +
			"\n" +
			upgradeOrder,
		Example: "  kctl cluster upgrade -f cluster.yaml --to ./keelson-v1.1.0-linux-amd64.tar.gz --dry-run\n" +
			"  kctl cluster upgrade -f cluster.yaml --to ./dist --drain w1,w2",
		Args: cobra.NoArgs,
	}
	file := addClusterFileFlag(c)
	c.Flags().StringVar(&u.to, "to", "", "release to install: a directory made by 'make dist', a tarball, or a URL")
	u.addFlags(c.Flags())
	c.RunE = func(*cobra.Command, []string) error {
		u.file = *file
		ctx, cancel := verb.WithSignals()
		defer cancel()
		return withInterruption(ctx, u.upgradeMachines(ctx, streams.Out))
	}
	return c
}

func (u *machineUpgrade) upgradeMachines(ctx context.Context, out io.Writer) error {
	if u.to == "" {
		return errors.New("--to is missing: want a directory made by 'make dist', a tarball, or a URL")
	}
	c, err := machines.Load(u.file)
	if err != nil {
		return err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	rel, err := release.Open(ctx, u.to, filepath.Join(cache, "keelson", "releases"))
	if err != nil {
		return err
	}
	site, seen := execute.Connect(ctx, c, out)
	defer site.Close()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	steps, _, err := (&installFlags{}).planSteps(ctx, out, site, seen, rel)
	if err != nil {
		return err
	}
	door := siteClusterClient{site}
	if err := u.checkMachines(ctx, c, door); err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	u.goal.Release = trimVersionPrefix(rel.Version)
	if u.dryRun {
		u.goal.Level = ^uint32(0) // not known: a dry run uploads no programs
	} else if err := u.uploadRelease(ctx, site, steps); err != nil {
		return err
	}
	of := func(d plan.Action) func(context.Context, string) error {
		return func(ctx context.Context, host string) error { return installOn(ctx, site, steps, d, host) }
	}
	fmt.Fprintln(out)
	if err := u.upgradeFlags.runUpgrade(ctx, &upgradeTarget{clusterClient: door, replica: of(plan.ControlPlane),
		agent: of(plan.Agent)}, out); err != nil || u.dryRun {
		return err
	}
	u.printFileHint(out, c, rel)
	return nil
}

// printFileHint prints a hint after an upgrade to rel if the cluster file c names another release.
// The hint is which release c should name, because 'kctl cluster up' installs the release in the
// cluster file.
func (u *machineUpgrade) printFileHint(out io.Writer, c machines.Cluster, rel plan.Release) {
	is := release.Version(c.Release)
	if is == rel.Version || c.Release == "" {
		return
	}
	if is == "" {
		is = "that is not known to be this one"
	}
	to := u.to
	if at, err := filepath.Abs(to); err == nil && !strings.Contains(to, "://") {
		to = at
	}
	fmt.Fprintf(out, "%s names a release %s: have it say 'release: %s', since 'kctl cluster up' and 'add' go by it\n",
		u.file, is, to)
}

// checkMachines returns an error if a replica or a node of the cluster is neither in cluster file c
// nor in --skip. It reads the cluster with client.
func (u *machineUpgrade) checkMachines(ctx context.Context, c machines.Cluster, client clusterClient) error {
	status, nodes, err := client.readCluster(ctx)
	if err != nil {
		return fmt.Errorf("the cluster does not respond, and can be upgraded only while it does: %w", err)
	}
	s := upgradeState(status, nodes)
	var strangers []string
	check := func(name string, is func(machines.Host) bool) {
		if h, err := c.Host(name); (err != nil || !is(h)) && !slices.Contains(u.goal.Skip, name) {
			strangers = append(strangers, name)
		}
	}
	for _, m := range s.Members {
		check(m.Name, machines.Host.HasReplica)
	}
	for _, n := range s.Nodes {
		check(n.Name, func(h machines.Host) bool { return h.HasRole(machines.Worker) })
	}
	if len(strangers) > 0 {
		return fmt.Errorf("%s: part of the cluster, but not in %s: add them to the file, or leave them at their "+
			"release with --skip", strings.Join(strangers, ", "), u.file)
	}
	return nil
}

// uploadRelease copies the new release to the machines, by the upload steps in steps. It sets
// u.goal.Level to the feature level that the copied programs report. No running program is changed.
// If no machine needs new programs, it sets u.goal.Level to the largest uint32.
func (u *machineUpgrade) uploadRelease(ctx context.Context, site *execute.Site, steps []plan.Step) error {
	var uploads []plan.Step
	for _, s := range steps {
		if s.Do == plan.Upload && !slices.Contains(u.goal.Skip, s.Machine) {
			uploads = append(uploads, s)
		}
	}
	if err := site.Install(ctx, uploads); err != nil {
		return err
	}
	for _, s := range steps {
		if s.Do != plan.ControlPlane && s.Do != plan.Agent || slices.Contains(u.goal.Skip, s.Machine) {
			continue
		}
		var err error
		u.goal.Level, err = readFeatureLevel(ctx, site, s, u.goal.Release)
		return err
	}
	u.goal.Level = ^uint32(0) // no machine needs new programs, so every level is sufficient
	return nil
}

// readFeatureLevel runs the uploaded programs of a release on the machine of step, and returns
// their feature level. It fails if the programs report another release than version.
func readFeatureLevel(ctx context.Context, site *execute.Site, step plan.Step, version string) (
	level uint32, err error,
) {
	controlplane, agent, err := site.DaemonVersions(ctx, step.Machine, step.Files[0])
	if err != nil {
		return 0, err
	}
	said, level, err := parseRelease(controlplane, agent)
	if err == nil && said != trimVersionPrefix(version) {
		err = fmt.Errorf("the programs on machine %s are of release %s, not %s: run the command again", step.Machine,
			said, trimVersionPrefix(version))
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", step.Files[0].Name, err)
	}
	return level, nil
}

// installOn runs the step in steps that installs daemon d (control plane or agent) on the host with
// that name. It fails if there is no such step, or if the host is not part of the cluster.
func installOn(ctx context.Context, site *execute.Site, steps []plan.Step, d plan.Action, host string) error {
	i := slices.IndexFunc(steps, func(s plan.Step) bool { return s.Machine == host && s.Do == d })
	if i < 0 {
		return fmt.Errorf("%s has the programs of the release, but its daemon does not report that release: "+
			"see 'journalctl -u "+
			"keelson-*' on that machine", host)
	}
	if steps[i].Start != "" {
		return fmt.Errorf("%s is not part of the cluster: add it with 'kctl cluster add'", host)
	}
	return site.Install(ctx, steps[i:i+1])
}

var _ upgrade.Cluster = (*upgradeTarget)(nil)
