package kctl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/resource"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	kubectlcompletion "k8s.io/kubectl/pkg/util/completion"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/verb"
)

func traceCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	output := ""
	c := &cobra.Command{
		Use:   "trace (TYPE/NAME | TYPE NAME)",
		Short: "Show the time that each stage of an apply took",
		Long: "Show the stages of the apply that created or changed an object, directly or through its owners.\n" +
			"Each stage is measured by the component that ran it. Its start is relative to the time when the\n" +
			"API received the request.",
		Example: "  kctl trace deployment/hello\n  kctl trace pod hello-7d4b9c-x2x4z -o json",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			info, err := getObject(f, "trace shows", args)
			if err != nil {
				return err
			}
			stages, err := readTimeline(cmd.Context(), f, info)
			if err != nil {
				return err
			}
			if output == "json" {
				enc := json.NewEncoder(streams.Out)
				enc.SetIndent("", "  ")
				return enc.Encode(stages)
			}
			if err := printTimeline(streams.Out, stages); err != nil {
				return err
			}
			printCurrentState(cmd.Context(), f, info, streams.Out)
			return nil
		},
	}
	c.ValidArgsFunction = kubectlcompletion.ResourceTypeAndNameCompletionFunc(f)
	c.Flags().StringVarP(&output, "output", "o", "",
		"output format: json prints the records of the stages; empty prints text")
	verb.CompleteFlag(c, "output", verb.FixedList("json"))
	return c
}

// getObject returns the object that args, such as TYPE/NAME, select. It fails if they do not select
// exactly one object. action starts the text of that error.
func getObject(f cmdutil.Factory, action string, args []string) (*resource.Info, error) {
	namespace, _, err := f.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return nil, err
	}
	infos, err := f.NewBuilder().Unstructured().NamespaceParam(namespace).DefaultNamespace().
		ResourceTypeOrNameArgs(false, args...).SingleResourceType().Flatten().Do().Infos()
	if err != nil {
		return nil, err
	}
	if len(infos) != 1 {
		return nil, fmt.Errorf("%s one object, and the arguments select %d: want TYPE/NAME", action, len(infos))
	}
	return infos[0], nil
}

// readTimeline returns the stages of the apply that created or changed the object info. It fails if
// no replica has them: replicas keep only the newest timelines, in memory.
func readTimeline(ctx context.Context, f cmdutil.Factory, info *resource.Info) ([]api.Stage, error) {
	if ctx == nil {
		ctx = context.Background()
	}
	urlPath, err := timelinePath(info)
	if err != nil {
		return nil, err
	}
	rest, err := f.KubernetesClientSet()
	if err != nil {
		return nil, err
	}
	raw, err := rest.RESTClient().Get().AbsPath(urlPath).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("requesting the timeline of %s: %w", info.ObjectName(), err)
	}
	var stages []api.Stage
	if err := json.Unmarshal(raw, &stages); err != nil {
		return nil, fmt.Errorf("reading the timeline of %s: %w", info.ObjectName(), err)
	}
	if len(stages) == 0 {
		return nil,
			fmt.Errorf("no replica has a timeline of the apply of %s: replicas keep only the newest "+
				"timelines, in memory",
				info.ObjectName())
	}
	return stages, nil
}

// timelinePath returns the API path of the timeline of object info. The path contains the trace ID
// from the object's annotations. If the object has no trace ID, the path contains the object's own
// API path.
func timelinePath(info *resource.Info) (string, error) {
	m, err := meta.Accessor(info.Object)
	if err != nil {
		return "", err
	}
	if id := api.TraceID(m.GetAnnotations()[api.TraceParentAnnotation]); id != "" {
		return path.Join(api.PathTimeline, id), nil
	}
	gvr := info.Mapping.Resource
	parts := []string{api.PathTimeline, "api", gvr.Version}
	if gvr.Group != "" {
		parts = []string{api.PathTimeline, "apis", gvr.Group, gvr.Version}
	}
	if info.Namespaced() {
		parts = append(parts, "namespaces", info.Namespace)
	}
	return path.Join(append(parts, gvr.Resource, info.Name)...), nil
}

const barWidth = 32

// printTimeline writes a row to w for each stage of an apply. A row contains the start and the
// duration in milliseconds, a bar, the stage, the component, and the object. stages must not be
// empty.
func printTimeline(w io.Writer, stages []api.Stage) error {
	slices.SortStableFunc(stages, func(a, b api.Stage) int { return a.Start.Compare(b.Start) })
	begin, end := stages[0].Start, stages[0].Start
	for _, s := range stages {
		if e := s.Start.Add(s.Duration); e.After(end) {
			end = e
		}
	}
	total := max(end.Sub(begin), time.Microsecond)
	fmt.Fprintf(w, "trace %s  from %s  %s ms in all\n\n", stages[0].TraceID, begin.UTC().Format("15:04:05.000"),
		formatMillis(total))
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "   START\t     TAKES\t\tSTAGE\tACTOR\tOBJECT\tDETAIL")
	for _, s := range stages {
		fmt.Fprintf(t, "%8s\t%10s\t%s\t%s\t%s\t%s\t%s\n",
			formatMillis(s.Start.Sub(begin)), formatMillis(s.Duration), drawBar(s.Start.Sub(begin), s.Duration, total),
			s.Name, s.Actor, s.Object, s.Detail)
	}
	return t.Flush()
}

func formatMillis(d time.Duration) string {
	return fmt.Sprintf("%.1f", float64(d)/float64(time.Millisecond))
}

func drawBar(start, d, total time.Duration) string {
	from := int(int64(start) * barWidth / int64(total))
	from = min(from, barWidth-1)
	n := max(1, int(int64(d)*barWidth/int64(total)))
	n = min(n, barWidth-from)
	mark := "█"
	if d == 0 {
		mark = "|"
	}
	return strings.Repeat("·", from) + strings.Repeat(mark, n) + strings.Repeat("·", barWidth-from-n)
}
