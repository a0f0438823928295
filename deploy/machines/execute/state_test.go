package execute

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/jsonpath"
)

// printed is what 'kctl get nodes -o jsonpath' prints.
func printed(t *testing.T, nodes ...v1.Node) string {
	t.Helper()
	raw, err := json.Marshal(v1.NodeList{Items: nodes})
	if err != nil {
		t.Fatal(err)
	}
	var all any
	if err := json.Unmarshal(raw, &all); err != nil {
		t.Fatal(err)
	}
	path := jsonpath.New("nodes").AllowMissingKeys(true)
	if err := path.Parse(strings.TrimPrefix(nodeJSONPath, "jsonpath=")); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := path.Execute(&out, all); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// A Node is read whatever it says of itself, in as many lines as it likes.
func TestNodesAreRead(t *testing.T) {
	well := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"disk": "a\tb"},
		Annotations: map[string]string{"keelson.dev/cluster-file": `{"labels":["disk"]}`}}}
	well.Spec.Taints = []v1.Taint{{Key: "a", Value: "b", Effect: "NoSchedule"}, {Key: "c", Effect: "NoExecute"}}
	well.Spec.Unschedulable = true
	well.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: "w1"},
		{Type: v1.NodeInternalIP, Address: "192.0.2.21"}, {Type: v1.NodeInternalIP, Address: "2001:db8::1"}}
	well.Status.Conditions = []v1.NodeCondition{{Type: "MemoryPressure", Status: v1.ConditionFalse},
		{Type: v1.NodeReady, Status: v1.ConditionTrue}}
	ill := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}
	ill.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionFalse,
		Message: "no runtime:\n\tline 2\n"}}
	silent := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w3"}}
	network := func(name string, status v1.ConditionStatus, reason string) v1.Node {
		n := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue},
			{Type: v1.NodeNetworkUnavailable, Status: status, Reason: reason, Message: "routes:\tno\nvxlan"}}
		return n
	}
	nodes, err := parseNodes(printed(t, well, ill, silent, network("w4", v1.ConditionTrue, "NetworkPartFailed"),
		network("w5", v1.ConditionFalse, "NetworkReady"), network("w6", v1.ConditionTrue, "CalicoIsDown")))
	if err != nil || len(nodes) != 6 {
		t.Fatalf("%+v, %v", nodes, err)
	}
	if n := nodes["w1"]; !n.Ready || !n.Unschedulable || n.Address != "192.0.2.21" ||
		n.Record != `{"labels":["disk"]}` || !maps.Equal(n.Labels, well.Labels) ||
		!slices.Equal(n.Taints, []string{"a=b:NoSchedule", "c:NoExecute"}) {
		t.Errorf("w1 is %+v", n)
	}
	if n := nodes["w2"]; n.Ready || n.Why != "no runtime:\n\tline 2\n" {
		t.Errorf("w2 is %+v", n)
	}
	if n := nodes["w3"]; n.Ready || n.Unschedulable {
		t.Errorf("w3 is %+v", n)
	}
	// What keeps traffic from pods is the agent's to say, and not that of a network product, which may come later.
	for name, want := range map[string]string{"w1": "", "w3": "", "w4": "routes:\tno\nvxlan", "w5": "", "w6": ""} {
		if is := nodes[name].Network; is != want {
			t.Errorf("%s says of its network %q, want %q", name, is, want)
		}
	}
	// What cannot be read is no Node that is not there.
	well.Annotations["keelson.dev/cluster-file"] = "one\nother"
	for _, raw := range []string{printed(t, well), "w1\tx\n", "w1\t{\t\t\t\t\t\n"} {
		if nodes, err := parseNodes(raw); err == nil {
			t.Errorf("%q was taken for %+v", raw, nodes)
		}
	}
}
