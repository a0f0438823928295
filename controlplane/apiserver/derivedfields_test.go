package apiserver_test

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A client owns the fields that it set and their defaults. It does not own the fields that the
// server derives from others (clusterIPs, dataSourceRef), which still get their values. F1
func TestDerivedFieldsHaveNoOwner(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	for _, c := range []struct {
		plural, body string
		owned, value string // owned is in managedFields, value is in the stored object
		derived      string
	}{
		{"services",
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"None",` +
				`"selector":{"a":"b"}}}`,
			`"f:clusterIP":{}`, `"clusterIPs":["None"]`, "f:clusterIPs"},
		{"persistentvolumeclaims",
			`{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"a"},"spec":{` +
				`"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}},` +
				`"dataSource":{"kind":"PersistentVolumeClaim","name":"b"}}}`,
			`"f:dataSource":{}`, `"dataSourceRef":{`, "f:dataSourceRef"},
	} {
		a := r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/"+c.plural, c.body)
		if a.Code != 201 || !strings.Contains(a.Body, c.owned) || !strings.Contains(a.Body, c.value) ||
			strings.Contains(a.Body, c.derived) {
			t.Errorf("%s answered %d %s\nwant %s owned, %s without owner", c.plural, a.Code, a.Body, c.owned, c.value)
		}
	}
}
