package podsecurity

import (
	"reflect"
	"strings"
	"testing"
)

// A configuration that cannot take effect is rejected with the name of the invalid field.
func TestConfigIsChecked(t *testing.T) {
	const head = "apiVersion: pod-security.admission.config.k8s.io/v1\nkind: PodSecurityConfiguration\n"
	for text, want := range map[string]string{
		head: "",
		head +
			"defaults: {enforce: strict, warn-version: v2}": "defaults.enforce",
		head +
			"defaults: {enforced: baseline}": "enforced",
		head +
			"exemptions: {namespaces: [a, a]}": "Duplicate value",
		head +
			"exemptions: {runtimeClasses: [UPPER]}": "exemptions.runtimeClasses[0]",
		head +
			`exemptions: {usernames: [""]}`: "username must not be empty",
		"kind: PodSecurityConfiguration": "want an AdmissionConfiguration",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: " +
			"AdmissionConfiguration": "",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: [{name: " +
			"ImagePolicyWebhook}]": "has no configuration here",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: [{name: PodSecurity, path: " +
			"absent}]": "no such file",
	} {
		got, err := parseConfig([]byte(text), t.TempDir())
		switch {
		case want == "" && (err != nil || !reflect.DeepEqual(got, Default())):
			t.Errorf("%s: %v %+v", text, err, got)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
