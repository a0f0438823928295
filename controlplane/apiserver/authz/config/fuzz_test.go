package config

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzConfiguration checks that any AuthorizationConfiguration, including its match conditions, is
// either accepted or rejected without a panic.
func FuzzConfiguration(f *testing.F) {
	dir := f.TempDir()
	kubeconfig, path := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "authz.yaml")
	conf := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\n" +
		"contexts: [{name: x, context: {cluster: c, user: ''}}]\ncurrent-context: x\n"
	if err := os.WriteFile(kubeconfig, []byte(conf), 0o600); err != nil {
		f.Fatal(err)
	}
	head := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
	hook := head + "- type: Webhook\n  name: w\n  webhook: {timeout: 3s, subjectAccessReviewVersion: v1, " +
		"failurePolicy: Deny, " +
		"matchConditionSubjectAccessReviewVersion: v1, connectionInfo: {type: KubeConfigFile, kubeConfigFile: " +
		kubeconfig + "}, matchConditions: [{expression: \""
	f.Add([]byte(head+"- {type: RBAC, name: r}\n- {type: Node, name: n}"), "")
	f.Add([]byte("a: &a [*a]"), "request.")
	for _, match := range []string{"has(request.resourceAttributes) && request.resourceAttributes.namespace == 'x'",
		"!('a' in request.groups)",
		"request.user.matches('(a*)*b')", "[1,2].map(x, [1,2].map(y, x*y)).size() > 1", "1/0 > 1"} {
		f.Add([]byte(hook+match+"\"}]}"), match)
	}
	f.Fuzz(func(t *testing.T, data []byte, match string) {
		for _, text := range [][]byte{data, []byte(hook + match + "\"}]}")} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			o := Defaults()
			o.ConfigFile = path
			if a, err := load(o); err == nil && a == nil {
				t.Errorf("%q is neither taken nor refused", text)
			}
		}
	})
}
