package nodecidr_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F107: no two nodes get one pod CIDR, although the outcome of a write is unknown and the write is committed later.
func TestNodesGetDistinctPodCIDRsAfterUnconfirmedWrite(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		givesCIDR := func(r *api.Request) bool {
			n, ok := r.Object.(*corev1.Node)
			return r.Verb == api.VerbUpdate && ok && r.Subresource == "" && n.Spec.PodCIDR != ""
		}
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			WrapBackend: func(b api.Backend) api.Backend {
				return &testcluster.UnconfirmedWrites{Backend: b, Match: givesCIDR}
			},
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{nodecidr.New(d, nodecidr.Options{ClusterCIDR: "10.244.0.0/16"})}
			}})
		for _, name := range []string{"w1", "w2", "w3"} {
			w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		w.Lead(engine.Options{})
		time.Sleep(time.Minute) // virtual
		have := map[string]string{}
		for _, name := range []string{"w1", "w2", "w3"} {
			n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", name)
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
