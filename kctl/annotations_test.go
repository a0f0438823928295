package kctl

import (
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/machines/plan"
)

// What admission keeps nodes from changing is what 'kctl cluster up' writes: deploy may not import the control plane, so the name
// stands there too.
func TestNodesMayNotChangeWhatUpWrites(t *testing.T) {
	if plan.RecordAnnotation != api.AnnotationClusterFile {
		t.Errorf("up writes %s, and nodes may not change %s", plan.RecordAnnotation, api.AnnotationClusterFile)
	}
}
