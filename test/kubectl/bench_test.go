package kubectl_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// BenchmarkKubectl measures the list of a thousand pods, an explanation of a pod with all fields,
// and an apply of a hundred objects of five kinds. The medians are of whole programs, from start
// to end, with each kubectl of this machine; "make bench-kubectl" prints them. The first run of
// each fills the program's cache and does not count.
func BenchmarkKubectl(b *testing.B) {
	all := apiservertest.StockKubectls()
	if len(all) == 0 {
		b.Skip("no stock kubectl on this machine")
	}
	r := apiservertest.StartReplica(b, nil)
	for i := range 1000 {
		r.Must(apiservertest.NewPod(fmt.Sprintf("pod-%04d", i)))
	}
	config := r.Kubeconfig("admin", "system:masters")
	for name, binary := range all {
		k := &apiservertest.Kubectl{T: b, Binary: binary, Config: config, Home: b.TempDir()}
		for what, args := range map[string][]string{
			"get-1000-pods":     {"get", "pods", "-A"},
			"explain-recursive": {"explain", "pod.spec", "--recursive"},
			"apply-100":         {"apply", "-f", "-"},
		} {
			b.Run(name+"/"+what, func(b *testing.B) {
				k.T = b
				k.Ok(hundredObjects(name+"-first"), args...)
				times := make([]time.Duration, b.N)
				for i := range times {
					input := hundredObjects(fmt.Sprint(name, "-", i, "-", b.N))
					began := time.Now()
					k.Ok(input, args...)
					times[i] = time.Since(began)
				}
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2].Milliseconds()), "median-ms")
			})
		}
	}
}

// hundredObjects returns a manifest of a hundred objects of five kinds with the name prefix.
func hundredObjects(prefix string) string {
	prefix = strings.ReplaceAll(prefix, ".", "-")
	var out strings.Builder
	for i := range 20 {
		name := fmt.Sprintf("%s-%d", prefix, i)
		fmt.Fprintf(&out, `
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: %[1]s}, data: {k: v}}
---
{apiVersion: v1, kind: Secret, metadata: {name: %[1]s}, stringData: {k: v}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: %[1]s}}
---
{apiVersion: v1, kind: Service, metadata: {name: %[1]s}, spec: {selector: {app: %[1]s}, ports: [{port: 80}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template: {metadata: {labels: {app: %[1]s}}, spec: {containers: [{name: c, image: nginx}]}}
`, name)
	}
	return out.String()
}
