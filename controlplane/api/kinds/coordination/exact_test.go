package coordination_test

import (
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// A lease may lose its holder: client-go's election does that when it is cancelled.
func TestLeaseWithoutHolder(t *testing.T) {
	held := kindstest.Load[*coordinationv1.Lease](t,
		"{metadata: {name: a, resourceVersion: '1'}, spec: {holderIdentity: me, leaseDurationSeconds: 15}}")
	for name, holder := range map[string]*string{"nobody": nil, "an empty name": new("")} {
		got, wrong := kindstest.RunUpdate(t, held, "", func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = holder, new(int32(1))
		})
		kindstest.CheckErrors(t, name, kinds.All().ByType(got).Validation.Object(got))
		if wrong != nil {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}
