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

// errFound ends 'kctl why' when something is wrong: all of it is said by then, only the exit code is left.
var errFound = errors.New("something is wrong")

// exitFound is the exit code for errFound: 1 is for what could not be asked at all.
const exitFound = 2

func whyCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "why (TYPE/NAME | TYPE NAME)",
		Short: "Explain why an object is not as it should be, with the command that would mend it",
		Long: "Explain in words why an object is not as it should be: a pod that has no node or does not run, a Deployment,\n" +
			"ReplicaSet, StatefulSet, DaemonSet or Job that does not come on, with its pods, a Service or an\n" +
			"EndpointSlice without traffic, a PersistentVolumeClaim without a volume, a HorizontalPodAutoscaler\n" +
			"that does not scale, a Namespace that does not go, a Node that is not Ready or cannot be drained, a PodDisruptionBudget that\n" +
			"allows no eviction, and for other kinds what the deletion waits for and which conditions do not hold.\n\n" +
			"It reads only what the explanation needs, with your rights, and names what you may not read.\n\n" +
			"Exit codes: 0 nothing is wrong, 1 the question could not be answered (no such kind or object,\n" +
			"no cluster), 2 something is wrong.",
		Example: "  kctl why deployment/hello\n  kctl why pod/hello-7d4b9c-x2x4z\n  kctl why pod hello-7d4b9c-x2x4z -o json\n  kctl why -n shop pod/db-0",
		Args:    cobra.MinimumNArgs(1),
	}
	output := outputFlag(c)
	c.ValidArgsFunction = kubectlcompletion.ResourceTypeAndNameCompletionFunc(f)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		info, err := oneObject(f, "why explains", args)
		if err != nil {
			return err
		}
		r, err := explained(cmd.Context(), f, info)
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

// explained reads what the explanation of an object needs, and explains it.
func explained(ctx context.Context, f cmdutil.Factory, info *resource.Info) (why.Report, error) {
	if ctx == nil {
		ctx = context.Background()
	}
	cs, err := f.KubernetesClientSet()
	if err != nil {
		return why.Report{}, err
	}
	subject := typed(info.Object)
	r := &whyReader{ctx: ctx, cs: cs, world: why.World{Now: time.Now()}}
	r.readFor(subject)
	if r.err != nil {
		return why.Report{}, fmt.Errorf("explaining %s: %w", info.ObjectName(), r.err)
	}
	return why.Explain(&r.world, subject), nil
}

// typed is an object in the type of its kind, or as it is where kctl knows no such type.
func typed(o runtime.Object) runtime.Object {
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

// printStanding ends a timeline with where the object stands now.
func printStanding(ctx context.Context, f cmdutil.Factory, info *resource.Info, w io.Writer) {
	r, err := explained(ctx, f, info)
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
