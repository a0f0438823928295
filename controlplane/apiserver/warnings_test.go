package apiserver_test

import (
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The API sends the warnings of a kind with a create and an update, once each, and none for a field
// without effect. F38
func TestWarningsOfKinds(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	send := func(method, path, body string, want ...string) {
		t.Helper()
		a := r.Call(r.AdminHTTP(), method, path, body, "Content-Type", "application/json")
		var got []string
		for _, h := range a.Header.Values("Warning") {
			got = append(got, strings.ReplaceAll(strings.TrimSuffix(strings.TrimPrefix(h, `299 - "`), `"`), `\"`, `"`))
		}
		if a.Code/100 != 2 || !slices.Equal(got, want) {
			t.Errorf("%s %s: %d %.300s\nwarnings %q, want %q", method, path, a.Code, a.Body, got, want)
		}
	}
	const deployment = `{"metadata":{"name":"a.b"},"spec":{"selector":{"matchLabels":{"a":"b"}},` +
		`"template":{"metadata":{"labels":{"a":"b"}},` +
		`"spec":{SECRETS"containers":[{"name":"c","image":"i"}]}}}}`
	const name = "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; " +
		"a DNS label is recommended: [must not contain dots]"
	with := func(secrets string) string { return strings.Replace(deployment, "SECRETS", secrets, 1) }
	send("POST", "/apis/apps/v1/namespaces/default/deployments", with(""), name)
	send("PUT", "/apis/apps/v1/namespaces/default/deployments/a.b",
		with(`"imagePullSecrets":[{"name":"s"},{"name":"s"}],`),
		`spec.template.spec.imagePullSecrets[1].name: duplicate name "s"`)
	send("POST", "/api/v1/namespaces/default/pods", `{"metadata":{"name":"armored","annotations":{`+
		`"container.apparmor.security.beta.kubernetes.io/c":"unconfined"}},`+
		`"spec":{"containers":[{"name":"c","image":"i"}]}}`,
		`metadata.annotations[container.apparmor.security.beta.kubernetes.io/c]: deprecated since v1.30; use the `+
			`"appArmorProfile" field instead`)
	send("POST", "/api/v1/namespaces/default/pods", `{"metadata":{"name":"labeled"},"spec":{"securityContext":{`+
		`"seLinuxOptions":{"level":"s0:c0,c1"}},"containers":[{"name":"c","image":"i"}]}}`)
	send("POST", "/api/v1/namespaces/default/persistentvolumeclaims",
		`{"metadata":{"name":"filled"},"spec":{"accessModes":["ReadWriteOnce"],`+
			`"resources":{"requests":{"storage":"1Gi"}},"dataSource":{"kind":"PersistentVolumeClaim","name":"other"}}}`)
	send("POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
		`{"metadata":{"name":"names"},"addressType":"FQDN",`+
			`"endpoints":[{"addresses":["example.com"]}]}`, "spec.addressType: FQDN endpoints are deprecated")
}
