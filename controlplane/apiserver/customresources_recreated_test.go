package apiserver_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/wakeup"
)

// lateDefinitions is a registry that delays changes of definitions to their follower. The table of
// kinds is then behind the watch cache, as while the schema of another definition is read.
type lateDefinitions struct {
	*registry.Registry
	asked wakeup.Signal // receives when the follower has to catch up

	mu   sync.Mutex
	held chan struct{} // closed while nothing is held
}

// hold delays changes until release is called.
func (l *lateDefinitions) hold() (release func()) {
	held := make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = held
	return sync.OnceFunc(func() { close(held) })
}

func (l *lateDefinitions) List(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.List.Limit == 1 {
		l.asked.Send()
	}
	return l.Registry.List(ctx, r)
}

func (l *lateDefinitions) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	from, err := l.Registry.Watch(ctx, r)
	if err != nil {
		return nil, err
	}
	events := make(chan watch.Event)
	to := watch.NewProxyWatcher(events)
	go func() {
		defer close(events)
		defer from.Stop()
		for event := range from.ResultChan() {
			l.mu.Lock()
			held := l.held
			l.mu.Unlock()
			for _, until := range []chan struct{}{held, nil} {
				send := events
				if until != nil {
					send = nil
				}
				select {
				case <-until:
				case send <- event:
				case <-to.StopChan():
					return
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return to, nil
}

const anyGizmo = "{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, " +
	"x-kubernetes-preserve-unknown-fields: true}}}"

func gizmosIn(scope string, versions ...string) string {
	return `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gizmos.example.com}
spec:
  group: example.com
  scope: ` + scope + `
  names: {plural: gizmos, kind: Gizmo}
  versions: [` + strings.Join(versions, ", ") + `]
`
}

// F15: a definition that was recreated serves as soon as a client sees that it is established, also
// on a replica that has not made its kinds yet: with the scope, the versions and the subresources
// of the new definition.
func TestRecreatedDefinitionsAreServedAtOnce(t *testing.T) {
	late := &lateDefinitions{asked: wakeup.New()}
	late.hold()()
	r := apiservertest.StartAdjusted(t, nil, func(s *apiserver.Server) {
		late.Registry = s.Settings().Registry
		s.SetDefinitions(late)
	})
	r.LeadDefinitions()
	c := r.AdminHTTP()
	const namespaced, cluster, jsonType = "/apis/example.com/v1/namespaces/default/gizmos",
		"/apis/example.com/v1/gizmos", "application/json"
	secondVersion := strings.NewReplacer("name: v1", "name: v2", "storage: true", "storage: false").Replace(anyGizmo)
	unstored := strings.Replace(anyGizmo, "storage: true", "storage: false", 1)
	stored := strings.Replace(anyGizmo, "name: v1", "name: v2", 1)
	hidden := strings.Replace(stored, "served: true", "served: false", 1)
	withStatus := strings.Replace(anyGizmo, "schema:", "subresources: {status: {}}, schema:", 1)
	for name, c2 := range map[string]struct{ first, second, method, path, body, want string }{
		"the same definition": {gizmosIn("Namespaced", anyGizmo), gizmosIn("Namespaced", anyGizmo), "POST",
			namespaced, apiservertest.Gizmo("v1", "b", "{}"), `"name":"b"`},
		"from cluster scope": {gizmosIn("Cluster", anyGizmo), gizmosIn("Namespaced", anyGizmo), "POST", namespaced,
			apiservertest.Gizmo("v1", "b", "{}"), `"name":"b"`},
		"to cluster scope": {gizmosIn("Namespaced", anyGizmo), gizmosIn("Cluster", anyGizmo), "POST", cluster,
			apiservertest.Gizmo("v1", "b", "{}"), `"name":"b"`},
		"with another version": {gizmosIn("Namespaced", anyGizmo), gizmosIn("Namespaced", anyGizmo, secondVersion),
			"GET", strings.Replace(namespaced, "v1", "v2", 1), "", `"GizmoList"`},
		"with a served version": {gizmosIn("Namespaced", unstored, hidden), gizmosIn("Namespaced", unstored, stored),
			"GET", strings.Replace(namespaced, "v1", "v2", 1), "", `"GizmoList"`},
		"with a new subresource": {gizmosIn("Namespaced", anyGizmo), gizmosIn("Namespaced", withStatus), "GET",
			namespaced + "/b/status", "", `\"b\" not found`},
	} {
		t.Run(name, func(t *testing.T) {
			r.Establish(c, c2.first)
			r.OK(r.Call(c, "GET", cluster, ""), `"GizmoList"`) // the kinds of the first definition are made
			release := late.hold()
			defer release()
			r.Drop(c, "gizmos.example.com")
			r.Establish(c, c2.second)
			select {
			case <-late.asked: // by an earlier request
			default:
			}
			got := make(chan apiservertest.Response, 1)
			go func() { got <- r.Call(c, c2.method, c2.path, c2.body, "Content-Type", jsonType) }()
			var a apiservertest.Response
			select {
			case a = <-got:
			case <-late.asked:
				release()
				a = <-got
			}
			if !strings.Contains(a.Body, c2.want) {
				t.Errorf("%s %s: %d %s", c2.method, c2.path, a.Code, a.Body)
			}
			release()
			r.Drop(c, "gizmos.example.com")
		})
	}
}
