package server_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/auditing"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// readAuditLog returns the audit records of a replica.
func (p *plane) readAuditLog(name string) (out []audit.Event) {
	p.T.Helper()
	data, err := os.ReadFile(filepath.Join(p.Members[name].Config.DataDir, "audit", "audit.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) { // the replica has received no request yet
		p.T.Fatal(err)
	}
	for raw := range bytes.Lines(data) {
		var e audit.Event
		if json.Unmarshal(raw, &e) == nil && e.ObjectRef != nil { // the last line may be incomplete
			out = append(out, e)
		}
	}
	return out
}

// createDeployment creates a Deployment and waits until its pod exists.
func (p *plane) createDeployment(at, name string) {
	p.T.Helper()
	ctx, cs, one := context.Background(), p.Client(at), int32(1)
	labels := map[string]string{"app": name}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "i"}}}}}}
	if _, err := cs.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		p.T.Fatal(err)
	}
	servertest.Eventually(p.T, func() error {
		pods, err := cs.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err == nil && len(pods.Items) != 1 {
			err = fmt.Errorf("%s has %d pods", name, len(pods.Items))
		}
		return err
	})
}

// deploymentCreators returns the replicas whose controllers have created the ReplicaSet and the pod
// of a Deployment, with their identities, from the audit logs.
func (p *plane) deploymentCreators(deployment string, among ...string) (out []string) {
	p.T.Helper()
	for _, name := range among {
		for _, e := range p.readAuditLog(name) {
			made := e.ObjectRef.Resource == "replicasets" || e.ObjectRef.Resource == "pods"
			if e.Verb == "create" && made && e.ObjectRef.Subresource == "" &&
				strings.HasPrefix(e.ObjectRef.Name, deployment+"-") && e.Stage == audit.StageResponseComplete {
				out = append(out, fmt.Sprintf("%s %s by %s", name, e.ObjectRef.Resource, e.User.Username))
			}
		}
	}
	return out
}

// Controllers run only on the raft leader, with their own identity, regardless of the replica that
// received the user's request. After a leader change, or when the leader stops, they run on the
// next leader. A restarted replica does not run them. F58
func TestControllersRunOnTheLeader(t *testing.T) {
	p := newPlane(t, 3, nil)
	all := []string{"cp1", "cp2", "cp3"}
	checkCreators := func(leader, deployment string, among ...string) {
		t.Helper()
		want := fmt.Sprintf("[%[1]s replicasets by system:kube-controller-manager %[1]s pods by "+
			"system:kube-controller-manager]", leader)
		servertest.Eventually(t, func() error {
			if got := fmt.Sprint(p.deploymentCreators(deployment, among...)); got != want {
				return fmt.Errorf("%s was created by %s, want %s", deployment, got, want)
			}
			return nil
		})
	}
	awaitLeader := func(to string, at ...string) {
		t.Helper()
		servertest.Eventually(t, func() error {
			for _, name := range at {
				s := p.ClusterStatus(name)
				if s.Leader == "" || to != "" && s.Leader != to {
					return fmt.Errorf("%s reports leader %q, want %s", name, s.Leader, to)
				}
				for _, m := range s.Members {
					if !m.Voter || m.Ready != "yes" {
						return fmt.Errorf("%s reports %+v", name, m)
					}
				}
			}
			return nil
		})
	}
	awaitLeader("", all...)
	first := p.ClusterStatus("cp1").Leader
	for i, at := range all {
		name := fmt.Sprint("first", i)
		p.createDeployment(at, name)
		checkCreators(first, name, all...)
	}
	second := map[string]string{"cp1": "cp2", "cp2": "cp3", "cp3": "cp1"}[first]
	if err := p.Call(first, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: second}, nil); err != nil {
		t.Fatal(err)
	}
	awaitLeader(second, all...)
	p.createDeployment(first, "second")
	checkCreators(second, "second", all...)

	p.CloseIdleConnections(second)
	p.StopReplica(second)
	var left []string
	for _, name := range all {
		if name != second {
			left = append(left, name)
		}
	}
	servertest.Eventually(t, func() error {
		if got := p.ClusterStatus(left[0]).Leader; got == second || got == "" {
			return fmt.Errorf("%q leads", got)
		}
		return nil
	})
	third := p.ClusterStatus(left[0]).Leader
	p.createDeployment(left[1], "third")
	checkCreators(third, "third", left...)
	p.Restart(second)
	awaitLeader("", all...)
	p.createDeployment(second, "fourth")
	checkCreators(p.ClusterStatus(second).Leader, "fourth", all...)
}

// listingWatch is a lister and watcher that starts with a list request, like clients before
// streaming lists.
type listingWatch struct{ *cache.ListWatch }

func (listingWatch) IsWatchListSemanticsUnSupported() bool { return true }

// configMapReads is an audit policy that records the lists and watches of ConfigMaps in namespace
// default.
const configMapReads = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["ResponseComplete"],
	"rules": [{"level": "Metadata", "verbs": ["list", "watch"], "namespaces": ["default"], "resources": [{"resources": ["configmaps"]}]}, {"level": "None"}]}`

// An informer lists a kind once and then watches from the revision of the list, as the audit log
// shows. An informer with streaming lists sends only a watch, which requests the initial events. A
// restarted informer does the same. F74
func TestListThenWatchAtStart(t *testing.T) {
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte(configMapReads), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *server.Config) {
		c.Access.Audit = auditing.Default()
		c.Access.Audit.PolicyFile = policy
	})
	runInformer := func(agent string, streams bool, expect ...string) {
		t.Helper()
		cfg := p.RESTConfig("cp1")
		cfg.UserAgent, cfg.Timeout = agent, 0
		cs, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			t.Fatal(err)
		}
		maps := cs.CoreV1().ConfigMaps("default")
		lw := &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				return maps.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return maps.Watch(ctx, o)
			},
		}
		var from cache.ListerWatcher = lw
		if !streams {
			from = listingWatch{lw}
		}
		store, follower := cache.NewInformerWithOptions(cache.InformerOptions{ListerWatcher: from,
			ObjectType: &v1.ConfigMap{}, Handler: cache.ResourceEventHandlerFuncs{}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); follower.RunWithContext(ctx) }()
		defer func() { cancel(); <-ended }()
		servertest.Eventually(t, func() error {
			for _, name := range expect {
				if _, there, _ := store.GetByKey("default/" + name); !there {
					return fmt.Errorf("%s is not in the store", name)
				}
			}
			return nil
		})
		p.PutConfigMap("cp1", "after-"+agent)
		servertest.Eventually(t, func() error {
			if _, there, _ := store.GetByKey("default/after-" + agent); !there {
				return fmt.Errorf("the object created after the list is not in the store")
			}
			return nil
		})
	}
	requestsOf := func(agent string) (out []url.Values) {
		t.Helper()
		for _, e := range p.readAuditLog("cp1") {
			if e.UserAgent != agent || e.Stage != audit.StageRequestReceived {
				continue
			}
			u, err := url.Parse(e.RequestURI)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, u.Query())
			out[len(out)-1].Set("verb", e.Verb)
		}
		return out
	}
	p.PutConfigMap("cp1", "before")
	runInformer("classic", false, "before")
	servertest.Eventually(t, func() error {
		q := requestsOf("classic")
		if len(q) != 2 || q[0].Get("verb") != "list" || q[1].Get("verb") != "watch" ||
			q[1].Get("sendInitialEvents") != "" {
			return fmt.Errorf("requests: %v, want a list and a watch", q)
		}
		if from := q[1].Get("resourceVersion"); from == "" || from == "0" {
			return fmt.Errorf("the watch starts at %q, not at the revision of the list", from)
		}
		return nil
	})
	runInformer("again", false, "before", "after-classic")
	runInformer("streams", true, "before", "after-classic", "after-again")
	servertest.Eventually(t, func() error {
		again, streams := requestsOf("again"), requestsOf("streams")
		if len(again) != 2 || again[0].Get("verb") != "list" || again[1].Get("verb") != "watch" {
			return fmt.Errorf("requests: %v, want a list and a watch", again)
		}
		if len(streams) != 1 || streams[0].Get("verb") != "watch" || streams[0].Get("sendInitialEvents") != "true" {
			return fmt.Errorf("requests: %v, want a watch with initial events", streams)
		}
		return nil
	})
	var first, second int
	if _, err := fmt.Sscan(requestsOf("classic")[1].Get("resourceVersion"), &first); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(requestsOf("again")[1].Get("resourceVersion"), &second); err != nil || second <= first {
		t.Errorf("the restarted informer watches from revision %d after %d, %v", second, first, err)
	}
}
