// Package servicecidr maintains the ranges and addresses of Services. ServiceCIDRs become ready,
// and are kept while an address needs them (servicecidr.go). Each cluster IP of a Service has its
// IPAddress (repair.go).
package servicecidr

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds/networking"
)

// Finalizer keeps a ServiceCIDR that is being deleted until no Service address needs it.
const Finalizer = "networking.k8s.io/service-cidr-finalizer"

// grace is the minimum age at which an IPAddress is deleted if its Service does not have the
// address. The Service may not be cached yet.
const grace = time.Minute

// Step is the next write for a ServiceCIDR. At most one field is set.
type Step struct {
	Finalizers []string // new finalizers; nil leaves them unchanged
	Ready      *metav1.Condition
}

// Next returns the next write for ServiceCIDR c. needed reports that, without c, an address would
// be in no ServiceCIDR.
func Next(c *networkingv1.ServiceCIDR, needed bool) Step {
	marked := slices.Contains(c.Finalizers, Finalizer)
	switch {
	case c.DeletionTimestamp == nil && !marked:
		return Step{Finalizers: append(slices.Clone(c.Finalizers), Finalizer)}
	case c.DeletionTimestamp == nil:
		message := "Services get addresses from this range"
		if slices.ContainsFunc(networking.ParseRanges(c), func(p netip.Prefix) bool { return p.Addr().Is6() }) {
			message = "Services are assigned IPv4 addresses of this range. IPv6 addresses are not assigned"
		}
		return Step{Ready: changedCondition(c, metav1.ConditionTrue, "Ready", message)}
	case !marked:
		return Step{}
	case needed:
		return Step{Ready: changedCondition(c, metav1.ConditionFalse, networkingv1.ServiceCIDRReasonTerminating,
			"Services have addresses that are in no other ServiceCIDR: delete those Services, or create a ServiceCIDR "+
				"that has their addresses")}
	}
	return Step{Finalizers: slices.DeleteFunc(slices.Clone(c.Finalizers), func(f string) bool {
		return f == Finalizer
	})}
}

// changedCondition returns condition Ready with these values, or nil if ServiceCIDR c already has
// it.
func changedCondition(
	c *networkingv1.ServiceCIDR, status metav1.ConditionStatus, reason, message string,
) *metav1.Condition {
	have := meta.FindStatusCondition(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
	if have != nil && have.Status == status && have.Reason == reason && have.Message == message {
		return nil
	}
	return &metav1.Condition{Type: networkingv1.ServiceCIDRConditionReady, Status: status, Reason: reason,
		Message: message}
}

// Needed reports whether one of the addresses is in c and in no other ServiceCIDR, not counting
// ServiceCIDRs that are being deleted. all are the ServiceCIDRs of the cluster.
func Needed(c *networkingv1.ServiceCIDR, all []*networkingv1.ServiceCIDR, addresses []netip.Addr) bool {
	own := networking.ParseRanges(c)
	var others []netip.Prefix
	for _, o := range all {
		if o.Name != c.Name && o.DeletionTimestamp == nil {
			others = append(others, networking.ParseRanges(o)...)
		}
	}
	return slices.ContainsFunc(addresses, func(a netip.Addr) bool {
		return networking.IsInRanges(a, own) && !networking.IsInRanges(a, others)
	})
}

// Fault is a problem with a cluster IP or a node port of a Service, and its repair.
type Fault struct {
	Reason, Message string // reason and message of the Event to record; empty means no Event
	Create          bool   // the missing IPAddress must be created
	Replace         bool   // the existing IPAddress is wrong and must be replaced
}

// Judge compares a cluster IP of Service svc with the existing IPAddress of that name, which is nil
// if it does not exist. It returns the zero Fault if they agree. ranges are the ranges of all
// ServiceCIDRs. parent is the Service to which the existing IPAddress refers, or nil.
func Judge(
	svc *corev1.Service, address string, ranges []netip.Prefix, existing *networkingv1.IPAddress,
	parent *corev1.Service,
) Fault {
	ip, err := netip.ParseAddr(address)
	family := corev1.IPv4Protocol
	if ip.Is6() {
		family = corev1.IPv6Protocol
	}
	switch {
	case err != nil:
		return Fault{Reason: "ClusterIPNotValid",
			Message: fmt.Sprintf("Cluster IP %s is not an IP address; create the Service again", address)}
	case !networking.IsInRanges(ip, ranges):
		return Fault{Reason: "ClusterIPOutOfRange", Message: fmt.Sprintf(
			"Cluster IP [%s]: %s is not within any ServiceCIDR; create a ServiceCIDR that contains it, or create the "+
				"Service again", family, address)}
	case existing == nil:
		return Fault{Reason: "ClusterIPNotAllocated", Create: true, Message: fmt.Sprintf(
			"Cluster IP [%s]: %s had no IPAddress; the IPAddress is created", family, address)}
	case networking.IsServiceIPAddress(existing, svc):
		want := networking.NewServiceIPAddress(svc, address)
		for k, v := range want.Labels {
			if existing.Labels[k] != v {
				return Fault{Replace: true}
			}
		}
		return Fault{}
	case parent != nil && slices.Contains(networking.ClusterAddresses(parent), address):
		return Fault{Reason: "ClusterIPAlreadyAllocated", Message: fmt.Sprintf(
			"Cluster IP [%s]: %s is also assigned to Service %s/%s; create this Service again", family, address,
			parent.Namespace, parent.Name)}
	}
	return Fault{Reason: "ClusterIPNotAllocated", Replace: true, Message: fmt.Sprintf(
		"Cluster IP [%s]: %s had the IPAddress of another object; the IPAddress is replaced", family, address)}
}
