package provision

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/execute"
	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/kctl/verb"
)

// RemoveCommand returns the command 'kctl cluster remove', which removes a machine from its
// cluster.
func RemoveCommand(streams genericiooptions.IOStreams) *cobra.Command {
	lost, dryRun := false, false
	c := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a machine of a cluster file from the cluster, by ssh",
		Long: "Remove a machine of a cluster file from the cluster, by ssh:\n" +
			"\n" +
			"  1. The node is drained while it is Ready. PodDisruptionBudgets are respected.\n" +
			"  2. Its replica leaves the raft cluster.\n" +
			"  3. Keelson is uninstalled from the machine, with all data.\n" +
			"  4. Its Node is deleted.\n" +
			"\n" +
			"The command refuses to remove a replica if the control plane would lose its quorum. If the command\n" +
			"is interrupted, run it again to continue. Afterwards, delete the machine from the cluster file.\n" +
			"Otherwise 'kctl cluster up' adds the machine again.\n" +
			"\n" +
			"A replica whose vote was given to a standby while it was down is also removed in this way. Added\n" +
			"again, it is a standby.",
		Example: "  kctl cluster remove w3 -f cluster.yaml\n" +
			"\n" +
			"  # Remove a replica whose machine no longer exists\n" +
			"  kctl cluster remove cp2 -f cluster.yaml --lost",
		Args: cobra.ExactArgs(1),
	}
	file := addClusterFileFlag(c)
	c.Flags().BoolVar(&lost, "lost", false,
		"the machine no longer exists: delete its member and its Node without contacting the machine")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "print the steps without running them")
	c.RunE = func(_ *cobra.Command, args []string) error {
		ctx, cancel := verb.WithSignals()
		defer cancel()
		return removeMachine(ctx, streams.Out, *file, args[0], lost, dryRun)
	}
	return c
}

func removeMachine(ctx context.Context, out io.Writer, file, name string, lost, dryRun bool) error {
	c, err := machines.Load(file)
	if err != nil {
		return err
	}
	if _, err := c.Host(name); err != nil {
		return err
	}
	var asked []string
	for _, h := range c.Hosts {
		if h.HasReplica() && h.Name != name || h.Name == name && !lost {
			asked = append(asked, h.Name)
		}
	}
	if len(asked) == 0 || len(asked) == 1 && asked[0] == name {
		return fmt.Errorf("%s has the only replica in the cluster file: to remove the whole cluster, use 'kctl "+
			"cluster reset'", name)
	}
	site, seen := execute.Connect(ctx, c, out, asked...)
	defer site.Close()
	site.Leaving = name
	if one := seen[name]; !lost && one.Err != nil {
		return fmt.Errorf("%w\n"+
			"nothing was changed. If the machine no longer exists, use --lost", one.Err)
	}
	if err := checkSameCluster(c, site.Facts()); err != nil {
		return err
	}
	state, err := site.State(ctx)
	if err != nil {
		return fmt.Errorf("nothing was changed, because the cluster does not respond: %w", err)
	}
	steps, err := plan.Remove(c, name, site.Facts()[name], state, lost)
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	switch {
	case len(steps) == 0:
		fmt.Fprintf(out, "nothing to do: %s is not part of the cluster, and Keelson is not installed on it\n", name)
	case dryRun:
		fmt.Fprintln(out, "what would be done:")
		plan.Show(out, steps)
	default:
		if err := site.Remove(ctx, steps); err != nil {
			return withInterruption(ctx, err)
		}
		fmt.Fprintf(out, "%s was removed from the cluster: delete it from %s. Otherwise 'kctl cluster up' adds it "+
			"again\n", name, file)
		if slices.ContainsFunc(steps, func(s plan.Step) bool { return s.Do == plan.Leave }) {
			fmt.Fprintln(out, "Run 'kctl cluster up' to update the agents. The machine had a copy of the cluster's "+
				"keys: if others may read its disk, see 'kctl cluster rotate --help'")
		}
	}
	return nil
}

// checkSameCluster returns an error if a machine of cluster file c belongs to another cluster.
// facts are the facts of the machines by name.
func checkSameCluster(c machines.Cluster, facts map[string]machines.Facts) error {
	for _, h := range c.Hosts {
		if why := plan.ForeignReason(c, facts, h.Name); why != "" {
			return fmt.Errorf("nothing was changed: %s", why)
		}
	}
	return nil
}

// ResetCommand returns the command 'kctl cluster reset', which uninstalls Keelson from all machines
// of a cluster file.
func ResetCommand(streams genericiooptions.IOStreams) *cobra.Command {
	confirmed := ""
	c := &cobra.Command{
		Use:   "reset",
		Short: "Uninstall a whole cluster from its machines, by ssh",
		Long: "Uninstall a whole cluster from its machines, by ssh. All pods, data, programs and settings are\n" +
			"deleted permanently. The command asks for the name of the cluster first.\n" +
			"\n" +
			"A failure on one machine does not stop the others. Run the command again to continue.",
		Example: "  kctl cluster reset -f cluster.yaml\n" +
			"\n" +
			"  # Without a prompt, for scripts\n" +
			"  kctl cluster reset -f cluster.yaml --yes-remove prod",
		Args: cobra.NoArgs,
	}
	file := addClusterFileFlag(c)
	c.Flags().StringVar(&confirmed, "yes-remove", "",
		"name of the cluster to uninstall, which replaces the prompt (for scripts)")
	c.RunE = func(*cobra.Command, []string) error {
		ctx, cancel := verb.WithSignals()
		defer cancel()
		return resetMachines(ctx, streams.In, streams.Out, *file, confirmed)
	}
	return c
}

func resetMachines(ctx context.Context, in io.Reader, out io.Writer, file, confirmed string) error {
	c, err := machines.Load(file)
	if err != nil {
		return err
	}
	if confirmed == "" {
		fmt.Fprintf(out, "This removes the cluster %s from %d machines, and deletes all of its data. Type its name to "+
			"continue: ", c.Name, len(c.Hosts))
		line, _ := bufio.NewReader(io.LimitReader(in, 1024)).ReadString('\n')
		fmt.Fprintln(out)
		confirmed = strings.TrimSpace(line)
	}
	if confirmed != c.Name {
		return fmt.Errorf("nothing was changed: the given name is %q, and the name of the cluster is %q", confirmed,
			c.Name)
	}
	site, seen := execute.Connect(ctx, c, out)
	defer site.Close()
	var missing []error
	for _, h := range c.Hosts {
		if err := seen[h.Name].Err; err != nil {
			missing = append(missing, err)
		}
	}
	if err := checkSameCluster(c, site.Facts()); err != nil {
		return err
	}
	if err := plan.CheckForeignNodes(c, site.Facts()); err != nil {
		return fmt.Errorf("nothing was changed: %w", errors.Join(err, errors.Join(missing...)))
	}
	raw, err := site.Kubeconfig(ctx) // read before the cluster is removed, to recognize its kubeconfig file afterwards
	if err != nil {
		raw = nil
	}
	workers, rest := plan.Reset(c, site.Facts())
	if err := errors.Join(site.Reset(ctx, workers, rest), errors.Join(missing...)); err != nil {
		return withInterruption(ctx, fmt.Errorf("parts of the cluster were not removed:\n"+
			"%w", err))
	}
	if to := machinesKubeconfig(c.Name); raw != nil {
		if is, err := os.ReadFile(to); err == nil && shareCA(is, raw) {
			if err := os.Remove(to); err != nil {
				return err
			}
			fmt.Fprintf(out, "removed %s\n", to)
		}
	}
	fmt.Fprintf(out, "the cluster %s was removed from %d machines\n", c.Name, len(c.Hosts))
	return nil
}
