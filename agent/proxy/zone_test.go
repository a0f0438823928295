package proxy

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// F117: the rules follow the zone of the node itself. A change of another node changes no rules.
func TestRulesFollowTheZone(t *testing.T) {
	objects := fake.NewCluster()
	node := func(name, zone string) *v1.Node {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{v1.LabelTopologyZone: zone}}}
	}
	objects.Put(node("w1", "a"), proxytest.Service("web", "10.96.0.10", 0),
		proxytest.Slice("web", proxytest.Hint(proxytest.Endpoint("10.244.0.2", "w1", true, true, false), "a", ""),
			proxytest.Hint(proxytest.Endpoint("10.244.1.2", "w2", true, true, false), "b", "")))
	s := newState(nil, "w1")
	take := func(news agent.ObjectChanges) (changes []servicemodel.Change) {
		s.updateModel(objects, news)
		return s.model.UpdatePorts()
	}
	named := func(name string) (c agent.ObjectChanges) {
		c.AddKey(agent.ObjectKey{Kind: "Node", Name: name})
		return c
	}
	if take(agent.ObjectChanges{All: true}); backendAddresses(onlyPort(t, s.model).Backends.Cluster) !=
		"10.244.0.2:8080" {
		t.Error(backendAddresses(onlyPort(t, s.model).Backends.Cluster))
	}
	if c := take(named("w0")); len(c) != 0 {
		t.Errorf("another node's zone changes %v", c)
	}
	objects.Put(node("w1", "b"))
	if c := take(named("w1")); len(c) != 1 || backendAddresses(c[0].New.Backends.Cluster) != "10.244.1.2:8080" {
		t.Errorf("the node's own zone changes %v", c)
	}
}

// onlyPort returns the only Service port of the model.
func onlyPort(t *testing.T, m *servicemodel.Model) *servicemodel.Port {
	t.Helper()
	if len(m.Ports()) != 1 {
		t.Fatalf("want one port, got %v", m.Ports())
	}
	for _, p := range m.Ports() {
		return p
	}
	panic("unreachable")
}

// backendAddresses returns the addresses and ports of the backends, separated by spaces.
func backendAddresses(b []servicemodel.Backend) string {
	var out []string
	for _, x := range b {
		out = append(out, fmt.Sprintf("%s:%d", x.IP, x.Port))
	}
	return strings.Join(out, " ")
}
