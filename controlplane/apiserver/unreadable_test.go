package apiserver_test

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/raftstore"
)

// An object that cannot be decoded is named in the list's warning and in the
// metrics, answers 500 with the remedy, and goes with a plain delete; the replica stays ready.
func TestUndecodableObjectOverHTTP(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	broken := raftstore.Put("/registry/pods/default/broken", []byte("k8s\x00\x0a\xff"))
	if _, err := r.Store.Commit(t.Context(), raftstore.Commit{Ops: []raftstore.Op{broken}}); err != nil {
		t.Fatal(err)
	}
	const pods = "/api/v1/namespaces/default/pods"
	list := r.Call(c, "GET", pods, "")
	if list.Code != 200 || !strings.Contains(list.Header.Get("Warning"), "default/broken") {
		t.Errorf("list: %d, warning %q", list.Code, list.Header.Get("Warning"))
	}
	if other := r.Call(c, "GET", "/api/v1/namespaces/kube-system/pods", ""); other.Header.Get("Warning") != "" {
		t.Errorf("another namespace's list warns of %q", other.Header.Get("Warning"))
	}
	if one := r.Call(c, "GET", pods+"/broken", ""); one.Code != 500 ||
		!strings.Contains(one.Body, "kubectl delete pods broken -n default") {
		t.Errorf("get: %d %s", one.Code, one.Body)
	}
	metrics := r.Call(c, "GET", "/metrics", "").Body
	for _, want := range []string{`keelson_undecodable_objects{group="",resource="pods"} 1`,
		`keelson_undecodable_object{group="",name="broken",namespace="default",resource="pods"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	if ready := r.Call(c, "GET", "/readyz", ""); ready.Code != 200 {
		t.Errorf("readyz: %d %s", ready.Code, ready.Body)
	}
	if gone := r.Call(c, "DELETE", pods+"/broken", ""); gone.Code != 200 {
		t.Errorf("delete: %d %s", gone.Code, gone.Body)
	}
	if list := r.Call(c, "GET", pods, ""); list.Header.Get("Warning") != "" {
		t.Errorf("after the deletion the list warns of %q", list.Header.Get("Warning"))
	}
}
