package config

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

func load(o Options) (*Authorization, error) {
	return Load(Config{Options: o, Compilers: cel.New(), Clock: time.Now, Log: slog.New(slog.DiscardHandler)})
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Contradictory flags, and flags without another required flag, are rejected with the flag's name.
func TestOptionsAreChecked(t *testing.T) {
	for words, change := range map[string]func(*Options){
		"cannot be combined":                   func(o *Options) { o.ConfigFile, o.Modes = "f", []string{RBAC} },
		`"Guess"`:                              func(o *Options) { o.Modes = []string{"Guess"} },
		"twice":                                func(o *Options) { o.Modes = []string{RBAC, RBAC} },
		"requires --authorization-policy-file": func(o *Options) { o.Modes = []string{ABAC} },
		"requires --authorization-webhook-config-file": func(o *Options) { o.Modes = []string{Webhook} },
		"requires --authorization-mode":                func(o *Options) { o.PolicyFile = "f" },
		"no such file": func(o *Options) {
			o.Modes, o.PolicyFile = []string{ABAC}, "/none"
		},
	} {
		o := Defaults()
		change(&o)
		if _, err := load(o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
}

// An invalid file is rejected with the field's name.
func TestConfigurationFileIsChecked(t *testing.T) {
	kubeconfig := file(t, "kubeconfig", "apiVersion: v1\nkind: Config\n")
	head := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
	hook := func(more string) string {
		return head + "- type: Webhook\n  name: w\n  webhook: {timeout: 3s, subjectAccessReviewVersion: v1, " +
			"failurePolicy: Deny, " + more + "}\n"
	}
	known := "connectionInfo: {type: KubeConfigFile, kubeConfigFile: " + kubeconfig + "}"
	for text, words := range map[string]string{
		head:                             "authorizers: Required value",
		head + "- {type: X, name: x}":    "authorizers[0].type",
		head + "- {type: RBAC}":          "authorizers[0].name",
		head + "- {type: ABAC, name: a}": "--authorization-policy-file",
		hook(
			"connectionInfo: {type: InClusterConfig}"): "InClusterConfig",
		hook(
			"connectionInfo: {type: KubeConfigFile}"): "kubeConfigFile: Required value",
		hook(known + ", matchConditions: [{expression: " +
			"'request.'}]"): "matchConditions[0].expression",
		hook(known + ", matchConditionSubjectAccessReviewVersion: v1, matchConditions: [{expression: " +
			"'request.user'}]"): "must evaluate to bool",
		hook(known): "kubeconfig",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: " +
			"AuthenticationConfiguration\njwt: []": "want an AuthorizationConfiguration",
	} {
		o := Defaults()
		o.ConfigFile = file(t, "authz.yaml", text)
		if _, err := load(o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s\n%v; want %q", text, err, words)
		}
	}
}

// Administrators are allowed everything in every mode. The modes are evaluated in their order.
func TestModes(t *testing.T) {
	alice, admin := api.User{Name: "alice"}, api.User{Name: "root", Groups: []string{api.GroupMasters}}
	for modes, want := range map[string]authz.Decision{
		"": authz.NoOpinion, "RBAC": authz.NoOpinion, "AlwaysDeny": authz.NoOpinion, "AlwaysAllow": authz.Allow,
		"AlwaysDeny,AlwaysAllow": authz.Allow,
	} {
		o := Defaults()
		if modes != "" {
			o.Modes = strings.Split(modes, ",")
		}
		a, err := load(o)
		if err != nil {
			t.Fatal(err)
		}
		a.Bind(map[string]authz.Authorizer{Node: authz.AlwaysDeny{}, RBAC: authz.NewRBAC()})
		if d, _ := a.Authorize(t.Context(), &authz.Attributes{User: alice, Verb: "get", Resource: "pods"}); d != want {
			t.Errorf("%s: %v", modes, d)
		}
		if d, _ := a.Authorize(t.Context(), &authz.Attributes{User: admin, Verb: "get", Resource: "pods"}); d !=
			authz.Allow {
			t.Errorf("%s: an administrator: %v", modes, d)
		}
		if (a.Unlisted() != "") != strings.Contains(modes, "Always") {
			t.Errorf("%s: %q", modes, a.Unlisted())
		}
	}
}
