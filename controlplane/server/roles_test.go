package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
)

// audited are the records of a replica so far.
func (p *plane) audited(name string) (out []audit.Event) {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join(p.members[name].cfg.DataDir, auditFolder, "audit.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) { // nothing has been asked of it
		p.t.Fatal(err)
	}
	for raw := range bytes.Lines(data) {
		var e audit.Event
		if json.Unmarshal(raw, &e) == nil && e.ObjectRef != nil { // the last line may not be whole yet
			out = append(out, e)
		}
	}
	return out
}

// deployed makes a Deployment and waits until its controllers have made a pod.
func (p *plane) deployed(at, name string) {
	p.t.Helper()
	ctx, cs, one := context.Background(), p.client(at), int32(1)
	labels := map[string]string{"app": name}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "i"}}}}}}
	if _, err := cs.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		p.t.Fatal(err)
	}
	eventually(p.t, func() error {
		pods, err := cs.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err == nil && len(pods.Items) != 1 {
			err = fmt.Errorf("%s has %d pods", name, len(pods.Items))
		}
		return err
	})
}

// actors are the replicas in whose audit logs the controllers have made the ReplicaSet and the pod of a Deployment, with the
// identities by which they did.
func (p *plane) actors(deployment string, among ...string) (out []string) {
	p.t.Helper()
	for _, name := range among {
		for _, e := range p.audited(name) {
			made := e.ObjectRef.Resource == "replicasets" || e.ObjectRef.Resource == "pods"
			if e.Verb == "create" && made && e.ObjectRef.Subresource == "" && strings.HasPrefix(e.ObjectRef.Name, deployment+"-") && e.Stage == audit.StageResponseComplete {
				out = append(out, fmt.Sprintf("%s %s by %s", name, e.ObjectRef.Resource, e.User.Username))
			}
		}
	}
	return out
}

// Controllers are a role apart from the API: they work by an identity of their own, on the replica that is elected and on no
// other, wherever the user's request came in. When another is elected, or the one that has the role ends, the next goes on;
// the one that ended comes back without it. F58
func TestControllersAreARole(t *testing.T) {
	p := newPlane(t, 3, nil)
	all := []string{"cp1", "cp2", "cp3"}
	is := func(leader, deployment string, among ...string) {
		t.Helper()
		want := fmt.Sprintf("[%[1]s replicasets by system:kube-controller-manager %[1]s pods by system:kube-controller-manager]", leader)
		eventually(t, func() error {
			if got := fmt.Sprint(p.actors(deployment, among...)); got != want {
				return fmt.Errorf("%s was made at %s, want %s", deployment, got, want)
			}
			return nil
		})
	}
	elected := func(to string, at ...string) {
		t.Helper()
		eventually(t, func() error {
			for _, name := range at {
				s := p.status(name)
				if s.Leader == "" || to != "" && s.Leader != to {
					return fmt.Errorf("%s says that %q leads, want %s", name, s.Leader, to)
				}
				for _, m := range s.Members {
					if !m.Voter || m.Ready != "yes" {
						return fmt.Errorf("%s says %+v", name, m)
					}
				}
			}
			return nil
		})
	}
	elected("", all...)
	first := p.status("cp1").Leader
	for i, at := range all {
		name := fmt.Sprint("first", i)
		p.deployed(at, name)
		is(first, name, all...)
	}
	second := map[string]string{"cp1": "cp2", "cp2": "cp3", "cp3": "cp1"}[first]
	if err := p.call(first, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: second}, nil); err != nil {
		t.Fatal(err)
	}
	elected(second, all...)
	p.deployed(first, "second")
	is(second, "second", all...)

	p.hangUp(second)
	p.stop(second)
	var left []string
	for _, name := range all {
		if name != second {
			left = append(left, name)
		}
	}
	eventually(t, func() error {
		if got := p.status(left[0]).Leader; got == second || got == "" {
			return fmt.Errorf("%q leads", got)
		}
		return nil
	})
	third := p.status(left[0]).Leader
	p.deployed(left[1], "third")
	is(third, "third", left...)
	p.again(second)
	elected("", all...)
	p.deployed(second, "fourth")
	is(p.status(second).Leader, "fourth", all...)
}

// classic is a lister and watcher that lists by a list, as clients did before they could have it streamed.
type classic struct{ *cache.ListWatch }

func (classic) IsWatchListSemanticsUnSupported() bool { return true }

// A program that follows a kind lists it once when it begins, and then watches from the revision of that list on, which the
// audit log shows; a newer one has the list streamed by its watch, which asks for that. When it begins anew, so does it. F74
func TestListThenWatchAtStart(t *testing.T) {
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte(`{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["ResponseComplete"],
		"rules": [{"level": "Metadata", "verbs": ["list", "watch"], "namespaces": ["default"], "resources": [{"resources": ["configmaps"]}]}, {"level": "None"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *Config) { c.Audit = DefaultAudit(); c.Audit.PolicyFile = policy })
	follow := func(agent string, streams bool, expect ...string) {
		t.Helper()
		cfg := p.rest("cp1")
		cfg.UserAgent, cfg.Timeout = agent, 0
		cs, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			t.Fatal(err)
		}
		maps := cs.CoreV1().ConfigMaps("default")
		lw := &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return maps.List(ctx, o) },
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return maps.Watch(ctx, o)
			},
		}
		var from cache.ListerWatcher = lw
		if !streams {
			from = classic{lw}
		}
		store, follower := cache.NewInformerWithOptions(cache.InformerOptions{ListerWatcher: from, ObjectType: &v1.ConfigMap{}, Handler: cache.ResourceEventHandlerFuncs{}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); follower.RunWithContext(ctx) }()
		defer func() { cancel(); <-ended }()
		eventually(t, func() error {
			for _, name := range expect {
				if _, there, _ := store.GetByKey("default/" + name); !there {
					return fmt.Errorf("%s is not seen", name)
				}
			}
			return nil
		})
		p.put("cp1", "after-"+agent)
		eventually(t, func() error {
			if _, there, _ := store.GetByKey("default/after-" + agent); !there {
				return fmt.Errorf("what came after the list is not seen")
			}
			return nil
		})
	}
	asked := func(agent string) (out []url.Values) {
		t.Helper()
		for _, e := range p.audited("cp1") {
			if e.UserAgent != agent || e.Stage != audit.StageRequestReceived {
				continue
			}
			u, err := url.Parse(e.RequestURI)
			if err != nil {
				t.Fatal(err)
			}
			q := u.Query()
			q.Set("verb", e.Verb)
			out = append(out, q)
		}
		return out
	}
	p.put("cp1", "before")
	follow("classic", false, "before")
	eventually(t, func() error {
		q := asked("classic")
		if len(q) != 2 || q[0].Get("verb") != "list" || q[1].Get("verb") != "watch" || q[1].Get("sendInitialEvents") != "" {
			return fmt.Errorf("it asked %v, want a list and a watch", q)
		}
		if from := q[1].Get("resourceVersion"); from == "" || from == "0" {
			return fmt.Errorf("it watches from %q, not from its list", from)
		}
		return nil
	})
	follow("again", false, "before", "after-classic")
	follow("streams", true, "before", "after-classic", "after-again")
	eventually(t, func() error {
		again, streams := asked("again"), asked("streams")
		if len(again) != 2 || again[0].Get("verb") != "list" || again[1].Get("verb") != "watch" {
			return fmt.Errorf("it asked %v, want a list and a watch", again)
		}
		if len(streams) != 1 || streams[0].Get("verb") != "watch" || streams[0].Get("sendInitialEvents") != "true" {
			return fmt.Errorf("it asked %v, want a watch that begins with the list", streams)
		}
		return nil
	})
	var first, second int
	if _, err := fmt.Sscan(asked("classic")[1].Get("resourceVersion"), &first); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(asked("again")[1].Get("resourceVersion"), &second); err != nil || second <= first {
		t.Errorf("it begins anew at revision %d after %d, %v", second, first, err)
	}
}
