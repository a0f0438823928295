package stream

import (
	"net/netip"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// An agent dials only addresses of the requested pod: neither those of another pod nor loopback.
func TestDialRefusesWhatIsNotThePods(t *testing.T) {
	s, rt, _, _ := newTestServer(t)
	list, err := rt.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil || len(list.Items) != 1 {
		t.Fatal(list, err)
	}
	st, err := rt.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: list.Items[0].Id})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.checkAddress(t.Context(), "u1", netip.MustParseAddr(st.Status.Network.Ip)); err != nil {
		t.Errorf("the pod's own address: %v", err)
	}
	for _, c := range []struct {
		pod, address string
		port         int32
		want         string
	}{
		{"u1", "192.0.2.1", 80, "address 192.0.2.1 does not belong to pod u1"},
		{"u2", st.Status.Network.Ip, 80, "pod u2 has no running sandbox"},
		{"", st.Status.Network.Ip, 80, "does not belong to this node"},
		{"", "127.0.0.1", 80, "addresses of pods and of the node only"},
		{"u1", "::ffff:127.0.0.1", 80, "addresses of pods and of the node only"},
		{"u1", "169.254.169.254", 80, "addresses of pods and of the node only"},
		{"u1", "example.org", 80, "invalid address or port"},
		{"u1", st.Status.Network.Ip, 0, "invalid address or port"},
		{"u1", st.Status.Network.Ip, 70000, "invalid address or port"},
	} {
		conn, err := s.Dial(t.Context(), types.UID(c.pod), c.address, c.port)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v %v", c, conn, err)
		}
	}
}
