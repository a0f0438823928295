package apiserver

import (
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore"
)

// An object that cannot be decoded is named in the list's warning and in the
// metrics, answers 500 with the remedy, and goes with a plain delete; the replica stays ready.
func TestUndecodableObjectOverHTTP(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	broken := raftstore.Put("/registry/pods/default/broken", []byte("k8s\x00\x0a\xff"))
	if _, err := r.store.Commit(t.Context(), raftstore.Commit{Ops: []raftstore.Op{broken}}); err != nil {
		t.Fatal(err)
	}
	const pods = "/api/v1/namespaces/default/pods"
	list := r.call(c, "GET", pods, "")
	if list.code != 200 || !strings.Contains(list.header.Get("Warning"), "default/broken") {
		t.Errorf("list: %d, warning %q", list.code, list.header.Get("Warning"))
	}
	if other := r.call(c, "GET", "/api/v1/namespaces/kube-system/pods", ""); other.header.Get("Warning") != "" {
		t.Errorf("another namespace's list warns of %q", other.header.Get("Warning"))
	}
	if one := r.call(c, "GET", pods+"/broken", ""); one.code != 500 || !strings.Contains(one.body, "kubectl delete pods broken -n default") {
		t.Errorf("get: %d %s", one.code, one.body)
	}
	metrics := r.call(c, "GET", "/metrics", "").body
	for _, want := range []string{`keelson_undecodable_objects{group="",resource="pods"} 1`,
		`keelson_undecodable_object{group="",name="broken",namespace="default",resource="pods"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	if ready := r.call(c, "GET", "/readyz", ""); ready.code != 200 {
		t.Errorf("readyz: %d %s", ready.code, ready.body)
	}
	if gone := r.call(c, "DELETE", pods+"/broken", ""); gone.code != 200 {
		t.Errorf("delete: %d %s", gone.code, gone.body)
	}
	if list := r.call(c, "GET", pods, ""); list.header.Get("Warning") != "" {
		t.Errorf("after the deletion the list warns of %q", list.header.Get("Warning"))
	}
}
