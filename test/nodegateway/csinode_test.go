package nodegateway_test

import (
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
)

// The CSINode of a node follows its agent's report of CSI drivers, is owned by the Node, and is
// recreated when a client deletes it.
func TestCSINode(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	if _, err := client.Get[*storagev1.CSINode](b.ctx, b.client, "", "w1"); err == nil {
		t.Error("a CSINode, although the agent has not reported drivers yet")
	}
	say := func(drivers string) {
		facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
			Labels:      map[string]string{"topology.example.com/rack": "r7"},
			Annotations: map[string]string{"keelson.dev/csi-drivers": drivers, "csi.volume.kubernetes.io/nodeid": "{}"},
		}}
		n.Facts(facts)
	}
	await := func(want ...string) *storagev1.CSINode {
		t.Helper()
		var got *storagev1.CSINode
		b.awaitCondition("CSINode", func() (err error) {
			if got, err = client.Get[*storagev1.CSINode](b.ctx, b.client, "", "w1"); err != nil {
				return err
			}
			names := []string{}
			for _, d := range got.Spec.Drivers {
				names = append(names, d.Name)
			}
			if !slices.Equal(names, want) {
				return fmt.Errorf("drivers %v, want %v", names, want)
			}
			return nil
		})
		return got
	}
	say(`[]`)
	await()
	say(`[{"name":"a.example.com","nodeID":"id-1","topologyKeys":["topology.example.com/rack"],"allocatable":16},` +
		`{"name":"b.example.com","nodeID":"w1"}]`)
	got := await("a.example.com", "b.example.com")
	node, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1")
	if err != nil {
		t.Fatal(err)
	}
	if o := got.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].APIVersion != "v1" || o[0].Name != "w1" ||
		o[0].UID != node.UID {
		t.Errorf("owners %+v, want the Node %s", o, node.UID)
	}
	if d := got.Spec.Drivers[0]; d.NodeID != "id-1" ||
		!slices.Equal(d.TopologyKeys, []string{"topology.example.com/rack"}) || d.Allocatable == nil ||
		*d.Allocatable.Count != 16 {
		t.Errorf("driver %+v", d)
	}
	if d := got.Spec.Drivers[1]; d.Allocatable != nil {
		t.Errorf("a limit that was not reported: %+v", d)
	}
	if node.Labels["topology.example.com/rack"] != "r7" {
		t.Errorf("labels %v lack the topology of the driver", node.Labels)
	}
	if err := client.Delete[*storagev1.CSINode](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await("a.example.com", "b.example.com")
	say(`[{"name":"b.example.com","nodeID":"w1"}]`)
	await("b.example.com")
	say(`nonsense`) // ends neither the session nor changes the CSINode
	say(`[]`)
	await()
}
