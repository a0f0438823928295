package scheduler_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	wire "k8s.io/kube-scheduler/extender/v1"

	"keelson.dev/keelson/controlplane/scheduler"
)

// outside is a real extender over HTTP. A handler that is nil refuses its verb with 404.
type outside struct {
	filter     func(wire.ExtenderArgs) any
	prioritize func(wire.ExtenderArgs) any
	preempt    func(wire.ExtenderPreemptionArgs) any
	bind       func(wire.ExtenderBindingArgs) any
	raw        http.HandlerFunc // instead of all
	asked      atomic.Int64
}

// ServeHTTP implements http.Handler.
func (o *outside) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.asked.Add(1)
	if o.raw != nil {
		o.raw(w, r)
		return
	}
	switch r.URL.Path {
	case "/x/filter":
		answer(w, r, o.filter)
	case "/x/prioritize":
		answer(w, r, o.prioritize)
	case "/x/preempt":
		answer(w, r, o.preempt)
	case "/x/bind":
		answer(w, r, o.bind)
	}
}

func answer[Q any](w http.ResponseWriter, r *http.Request, f func(Q) any) {
	var q Q
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil || f == nil {
		http.Error(w, "not here", http.StatusNotFound)
		return
	}
	_ = json.NewEncoder(w).Encode(f(q))
}

// extended is a bed whose scheduler asks the service; more are further fields of the extender.
func extended(t *testing.T, o *outside, more string) (b *bed, url string) {
	t.Helper()
	s := httptest.NewServer(o)
	t.Cleanup(s.Close)
	b = newBedOf(t,
		scheduler.Config{Settings: settings(t, fmt.Sprintf("extenders: [{urlPrefix: '%s/x', %s}]", s.URL, more))})
	return b, s.URL + "/x"
}

// Of the nodes that fit, the extender's filter leaves some and its scores, weighed, choose; what it leaves out is
// explained with its words and its name.
func TestExtenderFiltersAndScores(t *testing.T) {
	for _, names := range []bool{false, true} {
		o := &outside{
			filter: func(q wire.ExtenderArgs) any {
				if names != (q.NodeNames != nil) || names != (q.Nodes == nil) {
					t.Errorf("nodeCacheCapable %v: asked with names %v, nodes %v", names, q.NodeNames != nil,
						q.Nodes != nil)
				}
				out := wire.ExtenderFilterResult{FailedNodes: map[string]string{"a": "too hot"},
					FailedAndUnresolvableNodes: map[string]string{"b": "broken"}}
				if q.Pod.Name == "choosy" {
					out.FailedNodes["c"] = "too hot"
					return out
				}
				left := []string{"c", "d"}
				if names {
					out.NodeNames = &left
					return out
				}
				out.Nodes = &v1.NodeList{}
				for _, n := range q.Nodes.Items {
					if n.Name > "b" {
						out.Nodes.Items = append(out.Nodes.Items, n)
					}
				}
				return out
			},
			prioritize: func(q wire.ExtenderArgs) any {
				return wire.HostPriorityList{{Host: "c", Score: 10}, {Host: "d", Score: 1}}
			},
		}
		b, url := extended(t, o,
			fmt.Sprintf("filterVerb: filter, prioritizeVerb: prioritize, weight: 5, nodeCacheCapable: %v", names))
		for _, n := range []string{"a", "b", "c"} {
			b.node(n, "8")
		}
		b.node("d", "64") // the best for the plugins
		b.pod("choosy", "1")
		b.lead()
		b.awaitReason("choosy", "0/4 nodes are available: 1 broken (extender "+url+"), 1 node(s) left out (extender "+
			url+"), 2 too hot (extender "+url+"). "+
			"preemption: 0/4 nodes are available: 1 Preemption is not helpful for scheduling, 3 No preemption victims "+
			"found for incoming pod.")
		b.pod("p", "1")
		b.awaitNode("p", "c")
	}
}

// An extender is called only for pods that request its managed resources. Resources with
// ignoredByScheduler are checked by the extender alone.
func TestExtenderManagesResources(t *testing.T) {
	o := &outside{filter: func(q wire.ExtenderArgs) any { return wire.ExtenderFilterResult{NodeNames: q.NodeNames} }}
	b, _ := extended(t, o, "filterVerb: filter, nodeCacheCapable: true, managedResources: [{name: example.com/foo, "+
		"ignoredByScheduler: true}]")
	b.node("a", "8")
	b.lead()
	b.pod("plain", "1")
	b.awaitNode("plain", "a")
	if n := o.asked.Load(); n != 0 {
		t.Errorf("asked %d times about a pod without its resource", n)
	}
	b.pod("foo", "1", func(pod *v1.Pod) {
		l := v1.ResourceList{"example.com/foo": resource.MustParse("2")}
		pod.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: l, Limits: l}
	})
	b.awaitNode("foo", "a")
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times about a pod with its resource, want once", n)
	}
}

// hostile are services that lie, break, flood and hang.
func hostile() map[string]struct {
	raw  http.HandlerFunc
	want string
} {
	say := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(v) }
	}
	stranger := []string{"a", "nowhere"}
	return map[string]struct {
		raw  http.HandlerFunc
		want string
	}{
		"a node of which it was not asked": {say(wire.ExtenderFilterResult{NodeNames: &stranger}),
			`the response contains node "nowhere", which was not in the request`},
		"an error of many lines": {say(wire.ExtenderFilterResult{Error: "no\n\n" +
			strings.Repeat("x ", 9000)}), "filter: no x x"},
		"no JSON": {func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "<html>")
		}, "decoding the response"},
		"a status": {func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "go away", 500)
		}, "it answered 500: go away"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", 307)
		}, "it answered 307"},
		"a flood": {func(w http.ResponseWriter, _ *http.Request) {
			for err := error(nil); err == nil; {
				_, err = io.WriteString(w, strings.Repeat(" ", 64<<10))
			}
		}, "the response is larger than"},
		"silence": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // only then is it seen that the client went
			<-r.Context().Done()
		}, "Client.Timeout"},
		"half an answer": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, "{")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, "reading the response"},
	}
}

// awaitCondition waits until one of a pod's conditions is as wanted.
func (b *bed) awaitCondition(pod string, wanted func(v1.PodCondition) bool) {
	b.t.Helper()
	b.eventually("the condition", func() error {
		all := b.get(pod).Status.Conditions
		if !slices.ContainsFunc(all, wanted) {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
}

// An extender that fails keeps its pods waiting, and the condition names it and what is wrong in a bounded line; one that
// is ignorable is passed over.
func TestHostileExtenders(t *testing.T) {
	for name, h := range hostile() {
		for _, ignorable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s ignorable=%v", name, ignorable), func(t *testing.T) {
				o := &outside{raw: h.raw}
				b, url := extended(t, o,
					fmt.Sprintf("filterVerb: filter, prioritizeVerb: prioritize, weight: 1, nodeCacheCapable: true, "+
						"httpTimeout: 300ms, ignorable: %v", ignorable))
				b.node("a", "8")
				b.node("b", "8")
				b.lead()
				b.pod("p", "1")
				if ignorable {
					b.awaitNode("p", "")
					return
				}
				b.awaitCondition("p", func(c v1.PodCondition) bool {
					return c.Type == v1.PodScheduled && c.Reason == v1.PodReasonSchedulerError &&
						strings.Contains(c.Message, h.want) &&
						strings.HasPrefix(c.Message, "extender "+url) && len(c.Message) < 1000
				})
				if b.get("p").Spec.NodeName != "" {
					t.Error("the pod was bound all the same")
				}
			})
		}
	}
}

// Scores that cannot be are worth nothing, and keep no pod from its node.
func TestExtenderScoresThatCannotBe(t *testing.T) {
	for _, list := range []wire.HostPriorityList{{{Host: "b", Score: 1 << 60}}, {{Host: "b", Score: -5}},
		{{Host: "nowhere", Score: 5}}} {
		o := &outside{prioritize: func(wire.ExtenderArgs) any { return list }}
		b, _ := extended(t, o, "prioritizeVerb: prioritize, weight: 100")
		b.node("a", "64")
		b.node("b", "4")
		b.lead()
		b.pod("p", "2")
		b.awaitNode("p", "a")
	}
}

// An extender that binds does so instead of the scheduler; one that says no keeps the pod waiting.
func TestExtenderBinds(t *testing.T) {
	var b *bed
	var refuse atomic.Bool
	refuse.Store(true)
	o := &outside{bind: func(q wire.ExtenderBindingArgs) any {
		if refuse.Load() {
			return wire.ExtenderBindingResult{Error: "not yet"}
		}
		if err := b.bindAs(context.Background(), q.PodName, q.Node); err != nil {
			return wire.ExtenderBindingResult{Error: err.Error()}
		}
		return wire.ExtenderBindingResult{}
	}}
	b, url := extended(t, o, "bindVerb: bind")
	b.node("a", "4")
	b.lead()
	b.pod("p", "1")
	b.eventually("the refusal", func() error {
		for _, c := range b.get("p").Status.Conditions {
			if strings.Contains(c.Message, "extender "+url+": bind: not yet") {
				return nil
			}
		}
		return fmt.Errorf("%+v", b.get("p").Status.Conditions)
	})
	refuse.Store(false)
	b.awaitNode("p", "a")
	b.eventually("the count of bindings", func() error { // the pod is seen on its node before the binding is answered
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.bound["p"] != 1 {
			return fmt.Errorf("bound %d times", b.bound["p"])
		}
		return nil
	})
}

// No fence stops an extender that binds: it is called only after the leadership has been confirmed.
func TestExtenderBindsForTheLeaderOnly(t *testing.T) {
	var b *bed
	var replaced atomic.Bool
	var asked atomic.Int32
	o := &outside{bind: func(q wire.ExtenderBindingArgs) any {
		asked.Add(1)
		if err := b.bindAs(context.Background(), q.PodName, q.Node); err != nil {
			return wire.ExtenderBindingResult{Error: err.Error()}
		}
		return wire.ExtenderBindingResult{}
	}}
	s := httptest.NewServer(o)
	t.Cleanup(s.Close)
	b = newBedOf(t, scheduler.Config{
		Settings: settings(t, fmt.Sprintf("extenders: [{urlPrefix: '%s/x', bindVerb: bind}]", s.URL)),
		ConfirmLeadership: func(context.Context, uint64) error {
			if replaced.Load() {
				return errors.New("another replica leads")
			}
			return nil
		},
	})
	replaced.Store(true)
	b.node("a", "4")
	b.lead()
	b.pod("p", "1")
	b.awaitCondition("p", func(c v1.PodCondition) bool {
		return strings.Contains(c.Message, "was not called: another replica leads")
	})
	if n := asked.Load(); n != 0 {
		t.Errorf("the extender was asked %d times to bind", n)
	}
	replaced.Store(false)
	b.awaitNode("p", "a")
}

// An extender agrees with some of the nodes where pods would have to go, and cannot name other victims.
func TestExtenderPreempts(t *testing.T) {
	for _, lie := range []bool{false, true} {
		o := &outside{preempt: func(q wire.ExtenderPreemptionArgs) any {
			out := wire.ExtenderPreemptionResult{NodeNameToMetaVictims: map[string]*wire.MetaVictims{}}
			if v := q.NodeNameToVictims["b"]; v != nil {
				uid := string(v.Pods[0].UID)
				if lie {
					uid = "another"
				}
				out.NodeNameToMetaVictims["b"] = &wire.MetaVictims{Pods: []*wire.MetaPod{{UID: uid}}}
			}
			return out
		}}
		b, url := extended(t, o, "preemptVerb: preempt")
		b.node("a", "4")
		b.pod("small", "3")
		b.lead()
		b.awaitNode("small", "a")
		b.node("b", "4")
		b.pod("large", "4", important(1)) // the victim that costs more
		b.awaitNode("large", "b")
		b.pod("vip", "4", important(9))
		if lie {
			b.eventually("the explanation", func() error {
				for _, c := range b.get("vip").Status.Conditions {
					if strings.Contains(c.Message, "preemption: extender "+url+
						": preempt: on node \"b\" the response contains a pod that was not in the request") {
						return nil
					}
				}
				return fmt.Errorf("%+v", b.get("vip").Status.Conditions)
			})
			continue
		}
		b.eventually("the victim", func() error {
			if b.get("large").DeletionTimestamp == nil {
				return errors.New("it stays")
			}
			return nil
		})
		b.delete("large") // as its node does when it has ended
		b.awaitNode("vip", "b")
		if got := b.get("small").Spec.NodeName; got != "a" {
			t.Errorf("the other victim is on %q", got)
		}
	}
}

// An extender behind TLS is believed by its authority only.
func TestExtenderOverTLS(t *testing.T) {
	o := &outside{filter: func(q wire.ExtenderArgs) any { return wire.ExtenderFilterResult{NodeNames: q.NodeNames} }}
	s := httptest.NewTLSServer(o)
	defer s.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}),
		0o600); err != nil {
		t.Fatal(err)
	}
	for secured, bound := range map[string]bool{"tlsConfig: {caFile: " + ca + "}": true, "enableHTTPS: true": false} {
		b := newBedOf(t,
			scheduler.Config{Settings: settings(t,
				fmt.Sprintf("extenders: [{urlPrefix: '%s/x', filterVerb: filter, nodeCacheCapable: true, %s}]",
					s.URL, secured))})
		b.node("a", "4")
		b.lead()
		b.pod("p", "1")
		if bound {
			b.awaitNode("p", "a")
			continue
		}
		b.awaitCondition("p", func(c v1.PodCondition) bool { return strings.Contains(c.Message, "certificate") })
	}
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}
