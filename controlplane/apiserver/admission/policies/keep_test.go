package policies

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/internal/memory/memtest"
)

// crowd returns a number of Policies with one policy each. Each policy denies pods with an
// unexpected name; the message contains the policy's number.
func crowd(t testing.TB, in *cel.Admission, policies int) []*Policies {
	t.Helper()
	out := make([]*Policies, policies)
	cluster := objects{"namespaces//default": &corev1.Namespace{}}
	for i := range out {
		out[i] = New(Config{Versions: matching.Versions{Kinds: kinds.All()}, Cluster: cluster, Params: cluster,
			Expressions: in,
			Metrics:     prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
		v := policyOf(fmt.Sprintf("v%d", i))
		v.Spec.Variables = []arv1.Variable{{Name: "name", Expression: "object.metadata.name"}}
		v.Spec.MatchConditions = []arv1.MatchCondition{{Name: "mine",
			Expression: fmt.Sprintf("variables.name != 'apart-%d'", i)}}
		for e := range 8 {
			v.Spec.Validations = append(v.Spec.Validations, arv1.Validation{
				Expression: fmt.Sprintf("object.spec.containers.all(c, c.name != 'no-%d-%d' && size(c.image) < 1000)",
					i, e),
			})
		}
		v.Spec.Validations = append(v.Spec.Validations, arv1.Validation{
			Expression:        "variables.name.startsWith('good')",
			MessageExpression: fmt.Sprintf("'%d does not want ' + variables.name", i),
		})
		out[i].add(v)
		out[i].add(bindingOf(v.Name))
	}
	return out
}

// decided fails the test unless the policy admits valid and exempt pods and denies others with its
// message.
func (p *Policies) decided(t testing.TB, number int) {
	t.Helper()
	for name, want := range map[string]string{
		"good": "", fmt.Sprintf("apart-%d", number): "", "bad": fmt.Sprintf("%d does not want bad", number),
	} {
		a := podAttempt()
		a.Name = name
		a.Object.(*corev1.Pod).Name = name
		if err := p.Validate(t.Context(), a); want == "" && err != nil ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("policy %d, %s: got %v, want %q", number, name, err, want)
		}
	}
}

// Hundreds of policies with many expressions, each used once, do not stay compiled. The cache stays
// within its budget, by estimate and by heap growth. All policies decide correctly afterwards,
// including evicted ones.
func TestManyPoliciesAreNotKept(t *testing.T) {
	const most, policies = 2 << 20, 300
	in := cel.WithBudget(most).Admission()
	all := crowd(t, in, policies)
	crowd(t, in, 1)[0].decided(t, 0) // the environments, and caches of the libraries
	before := memtest.LiveHeap()
	for i, p := range all {
		p.decided(t, i)
	}
	grown := memtest.LiveHeap() - before
	taken, kept := in.CacheUsage()
	t.Logf("%d policies: %.1f MiB of heap; %d are kept, %.1f MiB by estimate", policies, float64(grown)/(1<<20), kept,
		float64(taken)/(1<<20))
	if taken > most || grown > 2*most || kept == 0 || kept >= policies {
		t.Errorf("the heap has grown by %d, %d are taken of %d by %d policies", grown, taken, most, kept)
	}
	for i, p := range all {
		p.decided(t, i)
	}
	runtime.KeepAlive(all)
}

// Decisions are correct while policies are evicted and compiled again concurrently.
func TestPoliciesDecideWhileTheyAreDropped(t *testing.T) {
	in := cel.WithBudget(1).Admission() // each new value evicts all others
	all := crowd(t, in, 5)
	var using sync.WaitGroup
	for g := range 6 {
		using.Go(func() {
			for i := range 10 {
				n := (g + i) % len(all)
				all[n].decided(t, n)
			}
		})
	}
	using.Wait()
	if _, kept := in.CacheUsage(); kept > 1 {
		t.Errorf("%d policies are kept in a room for one", kept)
	}
}
