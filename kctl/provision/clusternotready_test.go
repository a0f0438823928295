package provision

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// node has the model's node say something.
func (s *site) node(name, key string, value any) {
	s.t.Helper()
	raw, err := os.ReadFile(s.shared)
	var c map[string]any
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	c["Nodes"].(map[string]any)[name].(map[string]any)[key] = value
	if raw, err = json.Marshal(c); err != nil {
		s.t.Fatal(err)
	}
	put(s.t, s.shared, string(raw), 0o600)
}

// A node that is not ready is taken out at once: nobody there would say that a pod has ended. What a drain is refused is asked of one
// replica alone, which asks for long enough.
func TestClusterRemovesNodes(t *testing.T) {
	s := newSite(t)
	s.write("", "cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane", "w1 192.0.2.21 worker",
		"w2 192.0.2.22 worker")
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	begun := len(s.cluster().Done)
	s.node("w1", "Held", true)
	said, err := s.kctl("remove", "w1")
	if is := s.cluster().Done[begun:]; err == nil || !strings.Contains(err.Error(), "global timeout reached") ||
		!slices.Equal(is, []string{"drain w1"}) {
		t.Errorf("a pod does not leave it: %v, %q\n%s", err, is, said)
	}
	s.node("w1", "Trouble", "no runtime:\n\tline 2\n")
	said, err = s.kctl("remove", "w1")
	if is := s.cluster(); err != nil || !slices.Equal(is.Done[begun+1:], []string{"cordon w1"}) || len(is.Nodes) != 1 {
		t.Errorf("it is not ready: %v, %+v\n%s", err, is, said)
	}
}

// An agent that has begun is waited for until traffic comes to its pods.
func TestClusterAwaitsTraffic(t *testing.T) {
	s := newSite(t)
	s.write("", "cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker")
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	s.node("w1", "Looks", 6) // more than are made of a node that is well
	s.write("agent: {max-pods: 60}\n", "cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker")
	if said, err := s.kctl("up"); err != nil || !strings.Contains(said, "node w1 is ready") ||
		s.cluster().Nodes["w1"].Looks != 0 {
		t.Errorf("%v, %+v\n%s", err, s.cluster().Nodes["w1"], said)
	}
	if said, err := s.kctl("up"); err != nil || !strings.Contains(said, "nothing to do") {
		t.Errorf("there is still to do: %v\n%s", err, said)
	}
}
