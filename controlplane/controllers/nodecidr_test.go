package controllers_test

import (
	"context"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/internal/virtual"
)

// unconfirmedWrites is a backend that answers the first write that match selects with a timeout (504, outcome unknown).
// The write is committed right before the next selected write, like a raft entry whose followers have slow disks.
type unconfirmedWrites struct {
	api.Backend
	match func(*api.Request) bool

	mu   sync.Mutex
	late *api.Request
	done bool
}

func (u *unconfirmedWrites) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if !u.match(r) {
		return u.Backend.Do(ctx, r)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.done {
		u.done, u.late = true, r
		return nil, apierrors.NewTimeoutError("the store did not confirm the change in time; whether it was made is unknown", 1)
	}
	if late := u.late; late != nil {
		u.late = nil
		if _, err := u.Backend.Do(context.WithoutCancel(ctx), late); err != nil {
			return nil, err
		}
	}
	return u.Backend.Do(ctx, r)
}

// F107: no two nodes get one pod CIDR, although the outcome of a write is unknown and the write is committed later.
func TestNodesGetDistinctPodCIDRsAfterUnconfirmedWrite(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		givesCIDR := func(r *api.Request) bool {
			n, ok := r.Object.(*corev1.Node)
			return r.Verb == api.VerbUpdate && ok && r.Subresource == "" && n.Spec.PodCIDR != ""
		}
		w := newWorld(t, options{quiet: true,
			behind: func(b api.Backend) api.Backend { return &unconfirmedWrites{Backend: b, match: givesCIDR} },
			only: func(d controllers.Deps) []*controllers.Controller {
				return []*controllers.Controller{nodecidr.New(d, nodecidr.Options{ClusterCIDR: "10.244.0.0/16"})}
			}})
		for _, name := range []string{"w1", "w2", "w3"} {
			w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		w.lead(controllers.Options{})
		time.Sleep(time.Minute) // virtual
		have := map[string]string{}
		for _, name := range []string{"w1", "w2", "w3"} {
			n, err := client.Get[*corev1.Node](w.ctx, w.admin, "", name)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s has %q", name, n.Spec.PodCIDR)
			if n.Spec.PodCIDR == "" {
				t.Errorf("%s has no pod CIDR", name)
			}
			if other := have[n.Spec.PodCIDR]; other != "" {
				t.Errorf("%s and %s both have %s", other, name, n.Spec.PodCIDR)
			}
			have[n.Spec.PodCIDR] = name
		}
	})
}
