package kinds

import (
	coordinationv1 "k8s.io/api/coordination/v1"

	"keelson.dev/keelson/controlplane/api"
)

func leaseKind() *api.Kind {
	k := newKind[coordinationv1.Lease, coordinationv1.LeaseList](names{
		gv: coordinationv1.SchemeGroupVersion, kind: "Lease", plural: "leases", singular: "lease",
	})
	k.Namespaced = true
	return k
}
