package nodegateway

import (
	"bytes"
	"encoding/base64"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// F108: other nodes get a node's WireGuard key and its changes; an invalid key counts as none. The
// key of an agent that no longer encrypts is removed.
func TestKeysOfPeers(t *testing.T) {
	node := func(key string) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Annotations: map[string]string{}}, Spec: v1.NodeSpec{PodCIDRs: []string{"10.1.0.0/24"}},
			Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}}}
		if key != "" {
			n.Annotations[wireguardKey] = key
		}
		return n
	}
	a, b := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32)), base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{2}, 32))
	if p := peerOf(node(a)); !bytes.Equal(p.WireguardKey, bytes.Repeat([]byte{1}, 32)) {
		t.Errorf("the key is %v", p.WireguardKey)
	}
	for _, none := range []string{"", "abc", a + "AAAA", "%"} {
		if p := peerOf(node(none)); p == nil || p.WireguardKey != nil {
			t.Errorf("%q makes %v", none, p)
		}
	}
	if !samePeer(peerOf(node(a)), peerOf(node(a))) || samePeer(peerOf(node(a)), peerOf(node(b))) || samePeer(peerOf(node(a)), peerOf(node(""))) {
		t.Error("peers with other keys are the same, or those with one are not")
	}
	if got, want := string(labelPatch(node(a), node(b))), `{"metadata":{"annotations":{"keelson.dev/wireguard-key":"`+b+`"}}}`; got != want {
		t.Errorf("another key: %s", got)
	}
	if got, want := string(labelPatch(node(a), node(""))), `{"metadata":{"annotations":{"keelson.dev/wireguard-key":null}}}`; got != want {
		t.Errorf("no key any more: %s", got)
	}
}
