package registry

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// epitaph counts deleted Nodes per name in a companion object, which exists only while the Node
// does not.
func epitaph(obj api.Object, made bool, _ time.Time) []api.Companion {
	return []api.Companion{{Object: secretOf(obj.GetName()), Next: func(stored api.Object) api.Object {
		if made {
			return nil
		}
		next := secretOf(obj.GetName())
		if stored != nil {
			next = stored.DeepCopyObject().(*corev1.Secret)
		}
		next.Data = map[string][]byte{"uid": []byte(obj.GetUID())}
		return next
	}}}
}

func secretOf(node string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "epitaph-" + node},
		Type: corev1.SecretTypeOpaque}
}

func (e *env) epitaphOf(node string) (*corev1.Secret, error) {
	o, err := e.Registry.GetObject(e.ctx, e.request(api.VerbGet, secretOf(node)))
	if err != nil {
		return nil, err
	}
	return o.(*corev1.Secret), nil
}

// However an object is created or deleted, its companion changes in the same commit.
func TestCompanions(t *testing.T) {
	mem := storetest.NewMemory()
	e := runEnv(t, mem, New(mem, kinds.All(), WithCompanions(&corev1.Node{}, epitaph)))
	node := func(name string, finalizers ...string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: finalizers,
			Labels: map[string]string{"a": "b"}}}
	}
	remove := map[string]func(*corev1.Node) error{
		"delete": func(n *corev1.Node) error {
			_, _, err := e.Registry.Delete(e.ctx, e.request(api.VerbDelete, n), e.admit)
			return err
		},
		"collection": func(*corev1.Node) error {
			req := e.request(api.VerbDeleteCollection, &corev1.Node{})
			_, err := e.Registry.DeleteCollection(e.ctx, req, e.admit)
			return err
		},
		"finalizer": func(n *corev1.Node) error {
			if _, _, err := e.Registry.Delete(e.ctx, e.request(api.VerbDelete, n), e.admit); err != nil {
				return err
			}
			if _, err := e.epitaphOf(n.Name); !apierrors.IsNotFound(err) {
				return errors.New("a Node that is still there has its epitaph")
			}
			_, err := e.Registry.Modify(e.ctx, e.request(api.VerbUpdate, n), e.admit, func(o api.Object) error {
				o.SetFinalizers(nil)
				return nil
			})
			return err
		},
	}
	for name, gone := range remove {
		for round := range 2 { // in the second round, the companion exists and is deleted by the Node's creation
			n := node("n-" + name)
			if name == "finalizer" {
				n.Finalizers = []string{"example.com/a"}
			}
			made, err := e.tryCreate(n)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := e.epitaphOf(n.Name); !apierrors.IsNotFound(err) {
				t.Errorf("%s, round %d: a Node that has been made has an epitaph: %v", name, round, err)
			}
			if err := gone(n); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			s, err := e.epitaphOf(n.Name)
			if err != nil {
				t.Errorf("%s, round %d: %v", name, round, err)
				continue
			}
			if string(s.Data["uid"]) != string(made.GetUID()) || s.UID == "" || s.CreationTimestamp.IsZero() {
				t.Errorf("%s, round %d: %+v", name, round, s)
			}
			if _, err := e.Registry.GetObject(e.ctx, e.request(api.VerbGet, n)); !apierrors.IsNotFound(err) {
				t.Errorf("%s: the Node: %v", name, err)
			}
		}
	}
}

// A Node that cannot be decoded has companions as well, by its name.
func TestCompanionsOfTheUnreadable(t *testing.T) {
	mem := storetest.NewMemory()
	key := storedform.Root + "nodes/broken"
	if _, err := mem.Commit(t.Context(),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte("nonsense"))}}); err != nil {
		t.Fatal(err)
	}
	e := runEnv(t, mem, New(mem, kinds.All(), WithCompanions(&corev1.Node{}, epitaph)))
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "broken"}}
	if _, _, err := e.Registry.Delete(e.ctx, e.request(api.VerbDelete, n), e.admit); err != nil {
		t.Fatal(err)
	}
	if _, err := e.epitaphOf("broken"); err != nil {
		t.Error(err)
	}
}
