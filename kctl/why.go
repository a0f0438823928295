package kctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/resource"
	"k8s.io/client-go/kubernetes/scheme"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	kubectlcompletion "k8s.io/kubectl/pkg/util/completion"

	"keelson.dev/keelson/kctl/why"
)

// errFound is the error of 'kctl why' and 'kctl net' after they have printed the problems that they
// found. Main prints nothing for it and exits with exitFound.
var errFound = errors.New("something is wrong")

// exitFound is the exit code of a command that found problems. Exit code 1 means that the command
// itself failed.
const exitFound = 2

func whyCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "why (TYPE/NAME | TYPE NAME)",
		Short: "Explain why an object is not healthy, and show the command that repairs it",
		Long: "Explain why an object is not healthy, and show the command that repairs it:\n" +
			"\n" +
			"  - a pod that is not scheduled or does not run\n" +
			"  - a Deployment, ReplicaSet, StatefulSet, DaemonSet or Job that makes no progress\n" +
			"  - a Service or an EndpointSlice without traffic\n" +
			"  - a PersistentVolumeClaim without a volume\n" +
			"  - a HorizontalPodAutoscaler that does not scale\n" +
			"  - a Namespace that is not deleted\n" +
			"  - a Node that is not Ready or cannot be drained\n" +
			"  - a PodDisruptionBudget that allows no eviction\n" +
			"\n" +
			"For objects of other kinds, it shows what blocks their deletion and which conditions are not met.\n" +
			"The command reads only the objects that it needs, with your permissions, and lists the objects\n" +
			"that you may not read.\n" +
			"\n" +
			"Exit codes: 0 nothing is wrong; 1 the command failed (no such kind or object, no cluster);\n" +
			"2 something is wrong.",
		Example: "  kctl why deployment/hello\n  kctl why pod/hello-7d4b9c-x2x4z\n  kctl why pod hello-7d4b9c-x2x4z " +
			"-o json\n  kctl why -n shop pod/db-0",
		Args: cobra.MinimumNArgs(1),
	}
	output := outputFlag(c)
	c.ValidArgsFunction = kubectlcompletion.ResourceTypeAndNameCompletionFunc(f)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		info, err := getObject(f, "why explains", args)
		if err != nil {
			return err
		}
		r, err := explainObject(cmd.Context(), f, info)
		if err != nil {
			return err
		}
		done, err := printJSON(streams.Out, *output, r)
		if !done {
			err = r.Print(streams.Out, time.Now())
		}
		if err == nil && len(r.Findings) > 0 {
			err = errFound
		}
		return err
	}
	return c
}

// explainObject reads the objects that are needed to explain the object info, and returns the
// report about it. It fails if a request fails for a reason other than a missing permission.
func explainObject(ctx context.Context, f cmdutil.Factory, info *resource.Info) (why.Report, error) {
	if ctx == nil {
		ctx = context.Background()
	}
	cs, err := f.KubernetesClientSet()
	if err != nil {
		return why.Report{}, err
	}
	subject := toTyped(info.Object)
	r := &whyReader{ctx: ctx, cs: cs, world: why.World{Now: time.Now()}}
	r.readFor(subject)
	if r.err != nil {
		return why.Report{}, fmt.Errorf("explaining %s: %w", info.ObjectName(), r.err)
	}
	return why.Explain(&r.world, subject), nil
}

// toTyped converts o from its unstructured form to the Go type of its kind. It returns o unchanged
// if kctl has no Go type for the kind.
func toTyped(o runtime.Object) runtime.Object {
	u, ok := o.(runtime.Unstructured)
	if !ok {
		return o
	}
	out, err := scheme.Scheme.New(o.GetObjectKind().GroupVersionKind())
	if err != nil || runtime.DefaultUnstructuredConverter.FromUnstructured(u.UnstructuredContent(), out) != nil {
		return o
	}
	return out
}

// printCurrentState writes to w one line about the current state of the object info. 'kctl trace'
// prints it after the timeline.
func printCurrentState(ctx context.Context, f cmdutil.Factory, info *resource.Info, w io.Writer) {
	r, err := explainObject(ctx, f, info)
	switch {
	case err != nil:
		fmt.Fprintf(w, "\nwhere it stands is not known: %v\n", err)
	case len(r.Findings) == 0 && r.Well != "":
		fmt.Fprintf(w, "\nnow: %s\n", r.Well)
	case len(r.Findings) == 0:
		fmt.Fprintf(w, "\nnow: nothing is wrong with %s\n", r.Object)
	default:
		first := r.Findings[0]
		namespace := ""
		if info.Namespaced() {
			namespace = "-n " + info.Namespace + " "
		}
		fmt.Fprintf(w, "\nnow: %s %s\nmore: kctl %swhy %s\n", first.Object, first.What, namespace,
			strings.ToLower(info.ObjectName()))
	}
}
