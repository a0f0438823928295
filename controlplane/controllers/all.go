// Package controllers has the list of all controllers. Each directory below it holds one
// controller, and package engine runs them. The leader and the tests use the same list.
package controllers

import (
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/controlplane/controllers/clusterroleaggregation"
	"keelson.dev/keelson/controlplane/controllers/configrestart"
	"keelson.dev/keelson/controlplane/controllers/cronjob"
	"keelson.dev/keelson/controlplane/controllers/customresourcedefinition"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/devicetainteviction"
	"keelson.dev/keelson/controlplane/controllers/disruption"
	"keelson.dev/keelson/controlplane/controllers/endpoints"
	"keelson.dev/keelson/controlplane/controllers/endpointslice"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/ephemeralvolume"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/gateway"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
	"keelson.dev/keelson/controlplane/controllers/ingress"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/loadbalancer"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/nodelifecycle"
	"keelson.dev/keelson/controlplane/controllers/persistentvolume"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/controlplane/controllers/podgroupprotection"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/resourceclaim"
	"keelson.dev/keelson/controlplane/controllers/resourcequota"
	"keelson.dev/keelson/controlplane/controllers/resourceslice"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/controllers/servicecidr"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/controlplane/controllers/volumeattach"
	"keelson.dev/keelson/controlplane/controllers/volumeattributes"
	"keelson.dev/keelson/controlplane/controllers/volumecapacity"
	"keelson.dev/keelson/controlplane/controllers/volumeexpansion"
	"keelson.dev/keelson/controlplane/controllers/volumeprotection"
	"keelson.dev/keelson/controlplane/controllers/volumeprovision"
	"keelson.dev/keelson/controlplane/controllers/volumesnapshot"
)

// Deps are the dependencies of the controllers. Every controller gets the field Engine; each other
// field is for the few controllers that need it.
type Deps struct {
	Engine       engine.Deps
	NodeCIDRs    nodecidr.Options
	ServiceCIDR  string          // Service addresses: one prefix, or one of each IP family, separated by a comma
	Drivers      api.NodeDrivers // calls CSI drivers on nodes
	Roots        serviceaccount.Roots
	SignToken    serviceaccount.TokenSigner
	PodMetrics   horizontalpodautoscaler.Source
	PodGC        podgc.Options
	Rebalance    rebalance.Options
	ProxyImage   string // image of the ingress proxy; "" means the default image of each controller
	Certificates certificate.Options
}

// All returns the descriptors of all controllers. It starts nothing. The informers of deps must not
// run yet, because constructors add indexes to them.
func All(deps Deps) []*engine.Descriptor {
	d := deps.Engine
	return []*engine.Descriptor{
		// Workloads.
		deployment.New(d),
		replicaset.New(d),
		replicaset.NewForReplicationControllers(d),
		statefulset.New(d),
		daemonset.New(d),
		job.New(d),
		cronjob.New(d),
		disruption.New(d),
		horizontalpodautoscaler.New(d, deps.PodMetrics, horizontalpodautoscaler.Defaults),
		configrestart.New(d),
		rebalance.New(d, deps.Rebalance),
		// Services.
		endpointslice.New(d),
		endpointslice.NewMirror(d),
		endpoints.New(d),
		servicecidr.New(d, deps.ServiceCIDR),
		servicecidr.NewRepair(d),
		loadbalancer.New(d),
		gateway.New(d, gateway.Options{Image: deps.ProxyImage}),
		ingress.New(d, ingress.Options{Image: deps.ProxyImage}),
		// Nodes and pods.
		nodelifecycle.New(d),
		nodecidr.New(d, deps.NodeCIDRs),
		podgc.New(d, deps.PodGC),
		podgroupprotection.New(d),
		// Devices.
		resourceclaim.New(d),
		resourceslice.New(d),
		devicetainteviction.New(d),
		// Volumes.
		persistentvolume.New(d),
		ephemeralvolume.New(d),
		volumeprotection.New(d),
		volumeexpansion.New(d, deps.Drivers),
		volumeattributes.New(d, deps.Drivers),
		volumeprovision.New(d, deps.Drivers),
		volumecapacity.New(d, deps.Drivers),
		volumeattach.New(d, deps.Drivers),
		volumesnapshot.New(d, deps.Drivers),
		// Objects of any kind, namespaces and accounts.
		garbagecollector.New(d),
		namespace.New(d),
		resourcequota.New(d),
		customresourcedefinition.New(d),
		clusterroleaggregation.New(d),
		serviceaccount.New(d, deps.Roots),
		serviceaccount.NewTokens(d, deps.Roots, deps.SignToken),
		certificate.New(d, deps.Certificates),
	}
}
