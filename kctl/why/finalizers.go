package why

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// finalizerRemovers maps a finalizer to a description of the component or the condition that
// removes it.
var finalizerRemovers = map[string]string{
	"kubernetes.io/pvc-protection":          "a pod that uses the claim",
	"kubernetes.io/pv-protection":           "a claim that is bound to the volume",
	"scheduling.k8s.io/podgroup-protection": "the pods of the group, which have to end first",
	"foregroundDeletion": "dependents that are deleted first, by the " +
		"garbage collector",
	"orphan":                           "dependents that are let go first, by the garbage collector",
	"batch.kubernetes.io/job-tracking": "the Job controller, which has to count the pod",
	"kubernetes":                       "the namespace controller, which empties the namespace",
	"service.kubernetes.io/load-balancer-cleanup":         "the load balancer's controller",
	"customresourcecleanup.apiextensions.k8s.io":          "the objects of the kind, which are deleted first",
	"external-provisioner.volume.kubernetes.io/finalizer": "the provisioner of the volume",
	"keelson.dev/provisioning": "the driver that was asked for a volume, which has to " +
		"delete what it may have made",
}

// finalizerOwners returns a list of the finalizers as text, each with the component that removes
// it.
func finalizerOwners(finalizers []string) string {
	var out []string
	for _, f := range finalizers {
		by := finalizerRemovers[f]
		if domain, _, ok := strings.Cut(f, "/"); by == "" && ok {
			by = "the controller of " + domain
		}
		if by != "" {
			f = fmt.Sprintf("%s (%s)", f, by)
		}
		out = append(out, f)
	}
	return strings.Join(boundList(out), ", ")
}

// unfinalizeCommand returns the command that removes all finalizers from object o. kind is its kind
// as a command argument.
func unfinalizeCommand(o metav1.Object, kind string) string {
	return kctlCommand(o, `patch %s %s --type=merge -p '{"metadata":{"finalizers":null}}'   # only if their owners `+
		`are gone for good`, kind, o.GetName())
}
