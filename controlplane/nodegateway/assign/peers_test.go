package assign

import (
	"bytes"
	"encoding/base64"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
)

// F108: other nodes get a node's WireGuard key and its changes; an invalid key counts as none.
func TestWireGuardKeysOfPeers(t *testing.T) {
	node := func(key string) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Annotations: map[string]string{}},
			Spec:   v1.NodeSpec{PodCIDRs: []string{"10.1.0.0/24"}},
			Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}}}
		if key != "" {
			n.Annotations[wire.WireGuardKey] = key
		}
		return n
	}
	a, b := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32)),
		base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{2}, 32))
	if p := buildPeer(node(a)); !bytes.Equal(p.WireguardKey, bytes.Repeat([]byte{1}, 32)) {
		t.Errorf("the key is %v", p.WireguardKey)
	}
	for _, none := range []string{"", "abc", a + "AAAA", "%"} {
		if p := buildPeer(node(none)); p == nil || p.WireguardKey != nil {
			t.Errorf("%q makes %v", none, p)
		}
	}
	if !equalPeers(buildPeer(node(a)), buildPeer(node(a))) || equalPeers(buildPeer(node(a)), buildPeer(node(b))) ||
		equalPeers(buildPeer(node(a)), buildPeer(node(""))) {
		t.Error("peers with other keys are the same, or those with one are not")
	}
}
