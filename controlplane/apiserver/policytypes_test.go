package apiserver_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

const policiesPath = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"

// Policies for kinds that definitions make are checked against the schema of the definition, and
// again when it changes, comes or goes: F15.
func TestPolicyTypesOfCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Server.PolicyTypes().Run(ctx, 0) }()
	t.Cleanup(func() { cancel(); <-done })
	r.OK(r.Call(c, "POST", policiesPath,
		`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"p"},
		"spec":{"paramKind":{"apiVersion":"stable.example.com/v1","kind":"CronTab"},"matchConstraints":{"resourceRules":[{"operations":["CREATE"],
		"apiGroups":["stable.example.com"],"apiVersions":["v1"],"resources":["crontabs"]}]},
		"validations":[{"expression":"object.spec.replica > 1"},{"expression":"object.spec.replicas < params.spec.replicas && object.metadata.labels['a'] == 'b'"}]}}`,
		"Content-Type", "application/json"))
	// warned waits until the policy has been type-checked and its status has exactly these
	// warnings.
	warned := func(want ...string) {
		t.Helper()
		r.Eventually(func() error {
			var p struct {
				Status struct {
					TypeChecking *struct {
						ExpressionWarnings []struct{ FieldRef, Warning string }
					}
				}
			}
			body := r.OK(r.Call(c, "GET", policiesPath+"/p", "")).Body
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				return err
			}
			if p.Status.TypeChecking == nil || len(p.Status.TypeChecking.ExpressionWarnings) != len(want) {
				return fmt.Errorf("%s", body)
			}
			for i, w := range p.Status.TypeChecking.ExpressionWarnings {
				if !strings.Contains(w.FieldRef+": "+w.Warning, want[i]) {
					return fmt.Errorf("%+v", w)
				}
			}
			return nil
		})
	}
	warned() // the kind does not exist yet
	const misspelt = "spec.validations[0].expression: stable.example.com/v1, Kind=CronTab: ERROR: <input>:1:12: " +
		"undefined field 'replica'"
	r.Establish(c, apiservertest.Crontabs)
	warned(misspelt)
	replica :=
		`{"spec":{"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":
		{"spec":{"type":"object","properties":{"replica":{"type":"integer"},"replicas":{"type":"string"}}}}}}}]}}`
	r.OK(r.Call(c, "PATCH", apiservertest.DefinitionsPath+"/crontabs.stable.example.com", replica, "Content-Type",
		"application/merge-patch+json"))
	warned()
	r.OK(r.Call(c, "PATCH", apiservertest.DefinitionsPath+"/crontabs.stable.example.com",
		strings.Replace(replica, `"replica":`, `"copies":`, 1),
		"Content-Type", "application/merge-patch+json"))
	warned(misspelt)
	r.Drop(c, "crontabs.stable.example.com")
	warned()
}
