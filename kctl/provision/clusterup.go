package provision

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/execute"
	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/deploy/machines/release"
	"keelson.dev/keelson/kctl/verb"
)

// addClusterFileFlag adds the flag -f, --filename for the path of the cluster file to command c,
// and returns its value.
func addClusterFileFlag(c *cobra.Command) *string {
	f := ""
	c.Flags().StringVarP(&f, "filename", "f", "cluster.yaml",
		"path of the cluster file (docs/how-to/install-with-cluster-file.md)")
	return &f
}

// installFlags holds the flags and arguments of 'kctl cluster up' and 'kctl cluster add'.
type installFlags struct {
	file, release  string
	dryRun         bool
	kubeconfig     string
	merge, newOnly bool
	names          []string // machines to add; only for 'kctl cluster add'
}

func (r *installFlags) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&r.release, "release", "",
		"release to install instead of the cluster file's: a directory made by 'make dist', a tarball, or a URL")
	f.BoolVar(&r.dryRun, "dry-run", false, "print the steps without running them")
	f.StringVar(&r.kubeconfig, "kubeconfig-out", "",
		"file to which the administrator's kubeconfig is written (default ~/.kube/keelson-NAME)")
	f.BoolVar(&r.merge, "merge-kubeconfig", false,
		"add the kubeconfig to ~/.kube/config, or to the first file of $KUBECONFIG, under the cluster's name")
	verb.AddPreviousFlag(f, "merge-kubeconfig", "merge")
}

// UpCommand returns the command 'kctl cluster up', which creates the cluster of a cluster file or
// changes it to match the file.
func UpCommand(streams genericiooptions.IOStreams) *cobra.Command {
	var r installFlags
	c := &cobra.Command{
		Use:   "up",
		Short: "Create or update a cluster on the machines of a cluster file, by ssh",
		Long: "Create or update a cluster on the machines of a cluster file, by ssh.\n" +
			"\n" +
			"All machines are checked first, in parallel. If a check fails, the problem and its remedy are\n" +
			"printed and nothing is changed. If the cluster exists, only differences from the file and the\n" +
			"release are applied. If the command was interrupted, run it again to continue. Machines that are\n" +
			"not in the file are not changed and not removed: see 'kctl cluster remove'.\n" +
			"\n" +
			"A machine has one of the roles controlplane, standby and worker. The role worker can be combined\n" +
			"with controlplane or with standby. A standby is a replica without a vote. It gets the vote of a\n" +
			"replica that was unreachable for replace-dead-after (in the cluster file, default 10m), and keeps\n" +
			"it. The file sets the number of votes; the cluster chooses the replicas that have them. A replaced\n" +
			"replica that returns is refused. Remove it with 'kctl cluster remove'. Added again, it is a standby.",
		Example: "  # Check the machines and print the steps\n" +
			"  kctl cluster up -f cluster.yaml --dry-run\n" +
			"\n" +
			"  # Create or update the cluster\n" +
			"  kctl cluster up -f cluster.yaml\n" +
			"\n" +
			"  # Install a release from a tarball\n" +
			"  kctl cluster up -f cluster.yaml --release ./keelson-v1.1.0-linux-amd64.tar.gz",
		Args: cobra.NoArgs,
	}
	file := addClusterFileFlag(c)
	r.addFlags(c)
	c.RunE = func(*cobra.Command, []string) error {
		r.file = *file
		ctx, cancel := verb.WithSignals()
		defer cancel()
		return r.install(ctx, streams.Out)
	}
	return c
}

// AddCommand returns the command 'kctl cluster add', which adds new machines of a cluster file to
// the cluster.
func AddCommand(streams genericiooptions.IOStreams) *cobra.Command {
	r := installFlags{newOnly: true}
	c := &cobra.Command{
		Use:   "add [NAME...]",
		Short: "Add new machines of a cluster file to the cluster, by ssh",
		Long: "Add machines of a cluster file to the cluster, by ssh: those given by NAME, or all that are not\n" +
			"yet part of the cluster. No other machine is changed. 'kctl cluster up' adds machines too, and\n" +
			"also updates the others.",
		Example: "  kctl cluster add -f cluster.yaml\n" +
			"  kctl cluster add -f cluster.yaml w4 w5\n" +
			"\n" +
			"  # Add a replica without a vote, which has roles: [standby] in the file\n" +
			"  kctl cluster add -f cluster.yaml cp4",
	}
	file := addClusterFileFlag(c)
	r.addFlags(c)
	c.RunE = func(_ *cobra.Command, args []string) error {
		r.file, r.names = *file, args
		ctx, cancel := verb.WithSignals()
		defer cancel()
		return r.install(ctx, streams.Out)
	}
	return c
}

func (r *installFlags) install(ctx context.Context, out io.Writer) error {
	c, err := machines.Load(r.file)
	if err != nil {
		return err
	}
	for _, name := range r.names {
		if _, err := c.Host(name); err != nil {
			return err
		}
	}
	where := c.Release
	if r.release != "" {
		where = r.release
	}
	if where == "" {
		return fmt.Errorf("%s has no release, and --release is missing: want a directory made by 'make dist', a "+
			"tarball, or a URL", r.file)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	rel, err := release.Open(ctx, where, filepath.Join(cache, "keelson", "releases"))
	if err != nil {
		return err
	}
	site, seen := execute.Connect(ctx, c, out)
	defer site.Close()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	steps, state, err := r.planSteps(ctx, out, site, seen, rel)
	if err != nil {
		return err
	}
	if err := r.checkNewerRelease(site, rel, steps); err != nil {
		return err
	}
	switch {
	case len(steps) == 0:
		fmt.Fprintf(out, "\nnothing to do: all is as %s and release %s have it\n", r.file, rel.Version)
	case r.dryRun:
		fmt.Fprintf(out, "\nwhat would be done with release %s:\n", rel.Version)
		plan.Show(out, steps)
	default:
		fmt.Fprintln(out)
		if err := runInstallSteps(ctx, site, rel, state, steps); err != nil {
			return withInterruption(ctx, err)
		}
	}
	if r.dryRun {
		return nil
	}
	return r.storeKubeconfig(ctx, out, site)
}

// checkNewerRelease returns an error if steps would replace the release of a machine with rel,
// although rel is not known to be later. This can happen because the cluster file may name an older
// release than the last upgrade installed. If rel was given with --release, it returns nil.
func (r *installFlags) checkNewerRelease(site *execute.Site, rel plan.Release, steps []plan.Step) error {
	machine, runs := plan.FindDowngrade(site.Cluster, site.Facts(), rel, steps)
	if machine == "" || r.release != "" {
		return nil
	}
	return fmt.Errorf("nothing was changed: %s runs release %s, and %s requires %s, which is not known to "+
		"be later. To keep "+
		"the running release, set 'release' in the file to %s. To install %s, run 'kctl cluster upgrade --to "+
		"%s', or set --release",
		machine, runs, r.file, rel.Version, runs, rel.Version, site.Cluster.Release)
}

// runInstallSteps runs the steps of 'kctl cluster up' and 'kctl cluster add'. A replica cannot
// start with a release that supports a lower feature level than the store has (state.Level).
// Therefore, it first copies release rel to the machines and reads its feature level there. If that
// level is too low, no replica is changed and an error is returned.
func runInstallSteps(
	ctx context.Context, site *execute.Site, rel plan.Release, state plan.State, steps []plan.Step,
) error {
	i := slices.IndexFunc(steps, func(s plan.Step) bool {
		return s.Do == plan.ControlPlane && (s.ChangesPrograms || s.Start == plan.Join)
	})
	if i < 0 || state.Level == 0 {
		return site.Install(ctx, steps)
	}
	var uploads, rest []plan.Step
	for _, s := range steps {
		if s.Do == plan.Upload {
			uploads = append(uploads, s)
		} else {
			rest = append(rest, s)
		}
	}
	if err := site.Install(ctx, uploads); err != nil {
		return err
	}
	level, err := readFeatureLevel(ctx, site, steps[i], rel.Version)
	if err == nil && level < state.Level {
		err = fmt.Errorf("release %s supports feature levels up to %d, and the cluster's store has level %d: no "+
			"replica of that "+
			"release can start. Use the release of the running replicas, or a later one", rel.Version,
			level, state.Level)
	}
	if err != nil {
		return fmt.Errorf("the release was copied to the machines, and nothing else was changed: %w", err)
	}
	return site.Install(ctx, rest)
}

// withInterruption returns an error about the signal that canceled ctx, because err is then only a
// consequence of that signal. If no signal canceled ctx, it returns err.
func withInterruption(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w: commands on the machines may still be running; run this command again to continue",
			cause)
	}
	return err
}

// planSteps prints the machines of site and their problems. It returns the steps that install
// release rel, and the state of the cluster. observed contains the facts or the connection error of
// each machine by name. It fails if a problem prevents the installation.
func (r *installFlags) planSteps(
	ctx context.Context, out io.Writer, site *execute.Site, observed map[string]plan.Observation, rel plan.Release,
) ([]plan.Step, plan.State, error) {
	plan.ShowMachines(out, site.Cluster, observed)
	state, err := site.State(ctx)
	founder := plan.FoundingMachine(site.Cluster, site.Facts())
	if err != nil && founder == "" {
		fmt.Fprintf(out, "the cluster does not answer: %v\n", err)
	}
	found := plan.Inspect(site.Cluster, observed, rel, state)
	if len(found) > 0 {
		fmt.Fprintln(out)
		plan.ShowFindings(out, found)
	}
	if n := len(plan.BlockingFindings(found)); n > 0 {
		return nil, state, fmt.Errorf("nothing was changed: correct the problems above first (%d)", n)
	}
	if !r.newOnly {
		return plan.NewPlan(site.Cluster, site.Facts(), rel, state), state, nil
	}
	if founder != "" {
		return nil, state,
			errors.New("nothing was changed: no machine of the file has a replica, so there is no cluster to " +
				"add machines to: create it with 'kctl cluster up'")
	}
	if !state.Known {
		return nil, state,
			errors.New("nothing was changed: the cluster does not respond, and cannot add machines: 'kctl " +
				"cluster up' starts the replicas")
	}
	names := plan.NewMachines(site.Cluster, site.Facts())
	for _, name := range r.names {
		if !slices.Contains(names, name) {
			return nil, state,
				fmt.Errorf("nothing was changed: %s is already part of the cluster: to update it, use 'kctl "+
					"cluster up'", name)
		}
	}
	if len(r.names) > 0 {
		names = r.names
	}
	if len(names) == 0 {
		return nil, state, nil
	}
	steps := plan.NewPlan(site.Cluster, site.Facts(), rel, state, names...)
	if f := plan.MissingReplaceDead(site.Cluster, site.Facts(), steps); f != nil {
		fmt.Fprintln(out)
		plan.ShowFindings(out, []plan.Finding{*f})
	}
	return steps, state, nil
}
