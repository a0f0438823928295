package dns

import (
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
)

// The cost of one query for a Service, from packet to packet.
func BenchmarkService(b *testing.B) {
	s := New(Config{StateDir: b.TempDir(), Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	objects := fake.NewCluster()
	objects.Put(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: v1.ServiceSpec{ClusterIP: "10.96.0.7"}})
	s.index.Sync(objects.Services(), nil)
	s.configure(objects, objects)
	m := &dns.Msg{}
	m.SetQuestion("web.default.svc.cluster.local.", dns.TypeA)
	m.SetEdns0(1232, false)
	packet, err := m.Pack()
	if err != nil {
		b.Fatal(err)
	}
	buf, from := make([]byte, maxUDP), netip.MustParseAddr("10.244.0.1")
	b.ReportAllocs()
	for b.Loop() {
		in := &clientQuery{receivedAt: time.Now()}
		reply, _ := s.handleMessage(s.chain.Load(), packet, false, in)
		if s.packAndCount(in, reply, from, buf) == nil {
			b.Fatal("no answer")
		}
	}
}
