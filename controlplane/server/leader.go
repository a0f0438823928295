package server

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/operator"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/server/clusterobjects"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/raftstore"
)

func (r *Replica) wireLeader(schedulerConfig *config.Config) {
	client.Informer[*apiregistrationv1.APIService](r.api.informers) // this creates the informer for KeepAPIServices
	d := engine.Deps{
		Client: r.api.client, Informers: r.api.informers, Log: r.log.With("part", "controllers"),
		Timeline: r.api.timeline, Replica: r.cfg.Name, Now: time.Now,
		ConfirmLeadership: r.confirmLeadership, Aggregated: aggregatedAPIs{r}, PodAddresses: r.api.addresses,
	}
	r.leader.engine = engine.NewEngine(d, engine.Options{Metrics: r.leader.queues}, controllers.All(controllers.Deps{
		Engine:    d,
		NodeCIDRs: nodecidr.Options{ClusterCIDR: r.cluster.ClusterCIDR}, ServiceCIDR: r.cluster.ServiceCIDR,
		Drivers: &r.nodes, Roots: r.trust.ca, SignToken: r.trust.keys.SignSecretToken,
		PodMetrics:   r.autoscalerMetrics(),
		Rebalance:    rebalance.Options{Trial: r.newTrial, Interval: r.cfg.Leader.RebalanceInterval},
		ProxyImage:   r.cfg.Leader.IngressProxyImage,
		Certificates: certificate.Options{Sign: r.trust.ca.SignRequest, Reserved: pki.ReservedOrganizations()},
	})...)
	r.leader.scheduler = scheduler.New(scheduler.Config{
		Client:    r.api.client.As(api.User{Name: api.UserScheduler, Groups: []string{api.GroupAuthenticated}}),
		Informers: r.api.informers, Actor: "scheduler/" + r.cfg.Name, Timeline: r.api.timeline,
		Log:      r.log.With("part", "scheduler"),
		Settings: schedulerConfig, ConfirmLeadership: r.confirmLeadership, Metrics: r.leader.pods,
	})
}

// confirmLeadership returns nil if a quorum has confirmed, during the call, that this replica is
// the leader in the raft term.
func (r *Replica) confirmLeadership(ctx context.Context, term uint64) error {
	return r.store.ConfirmLeadership(ctx, raftstore.Fence(term))
}

// newTrial returns a simulation of scheduling, which starts from the scheduler's current snapshot
// of the cluster.
func (r *Replica) newTrial() (rebalance.Trial, error) {
	t, err := r.leader.scheduler.Trial()
	return trial{t}, err
}

type trial struct{ *scheduler.Trial }

// Evaluate simulates the scheduling of the pod p and returns the result. It implements
// rebalance.Trial.
func (t trial) Evaluate(ctx context.Context, p *v1.Pod) (rebalance.Verdict, error) {
	v, err := t.Trial.Evaluate(ctx, p)
	return rebalance.Verdict(v), err
}

// runLeader runs the leader's components, such as the controllers and the scheduler, until this
// replica loses leadership. A component that fails is restarted alone: a failure neither ends the
// leadership nor stops the other components. fence is the raft term of the leadership.
func (r *Replica) runLeader(ctx context.Context, fence raftstore.Fence) error {
	if r.cfg.servedBackup != nil { // the served backup must not change
		<-ctx.Done()
		return nil
	}
	started := time.Now()
	select {
	case <-r.api.server.CustomKinds(): // otherwise objects of unserved kinds would look deleted
	case <-ctx.Done():
		return nil
	}
	if err := r.api.informers.WaitForSync(ctx); err != nil {
		return nil // this replica has lost leadership
	}
	term := uint64(fence)
	// In a new cluster, the other parts need the default objects. They wait until all objects were
	// attempted once, even if an attempt failed. If the default objects exist, nothing waits.
	if objects := r.clusterObjects(); !objects.HasDefaults() {
		objects.WriteFirstDefaults(ctx, term)
	}
	r.log.Info("leading", "term", term, "after", time.Since(started))
	r.leader.work.RecordStart()
	defer r.leader.work.RecordStop()
	lifecycle.Supervise(ctx, r.recordPartFailure, r.partsOfLeader(term)...)
	return nil
}

// partsOfLeader returns the leader's components: the controllers, the scheduler and others. They
// write to the store only while the raft term is current.
func (r *Replica) partsOfLeader(term uint64) []lifecycle.Part {
	system := r.api.client.As(api.User{Name: api.UserAPIServer,
		Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(term)
	objects := r.clusterObjects()
	parts := []lifecycle.Part{
		{Name: "default objects", Run: func(ctx context.Context) error { return objects.KeepDefaults(ctx, term) }},
		{Name: "founder tokens", Run: func(ctx context.Context) error {
			return r.members.InitialTokens().StoreTokens(ctx,
				func(ctx context.Context, t pki.Token, g pki.Grant) error {
					return r.operator.RecordToken(ctx, term, t, g)
				})
		}},
		{Name: operator.SchedulerPart, Run: func(ctx context.Context) error {
			return r.leader.scheduler.Run(ctx, term)
		}},
		{Name: "fleet", Run: func(ctx context.Context) error { return r.nodes.gateway.RunLeader(ctx, system) }},
		{Name: "feature level", Run: func(ctx context.Context) error {
			return r.members.Level().KeepRaising(ctx, raftstore.Fence(term))
		}},
		{Name: "keys", Run: func(ctx context.Context) error { return r.trust.keys.Lead(ctx, raftstore.Fence(term)) }},
		{Name: "tokens in secrets", Run: func(ctx context.Context) error {
			return r.trust.keys.ReplaceLostTokens(ctx, term)
		}},
		{Name: "autopilot", Run: func(ctx context.Context) error {
			return r.members.ReplaceDead(ctx, system, raftstore.Fence(term))
		}},
		{Name: "spent records", Run: func(ctx context.Context) error {
			return r.nodes.gateway.RunSweeper(ctx, system)
		}},
		{Name: "policy types", Run: func(ctx context.Context) error {
			return r.api.server.PolicyTypes().Run(ctx, term)
		}},
		{Name: "api services", Run: func(ctx context.Context) error { return objects.KeepAPIServices(ctx, term) }},
		{Name: "conditions of api services", Run: func(ctx context.Context) error {
			return objects.KeepConditions(ctx, term)
		}},
		{Name: "kubernetes service", Run: func(ctx context.Context) error {
			return objects.KeepKubernetesService(ctx, system, term)
		}},
	}
	if a := r.sharedAddress(); a != nil {
		parts = append(parts, lifecycle.Part{Name: "shared address", Run: a.Hold})
	}
	return append(parts, r.leader.engine.Parts(term)...)
}

// recordPartFailure records and logs that the leader's component called part has failed with err,
// and that it is restarted after the duration restartDelay.
func (r *Replica) recordPartFailure(part string, err error, restartDelay time.Duration) {
	r.leader.work.RecordFailure(part, err, restartDelay)
	r.log.Error("a part of the leader's work failed and is restarted", "part", part, "err", err, "after", restartDelay)
}

// clusterObjects returns a clusterobjects.Keeper, which maintains the default objects, Service
// default/kubernetes and the APIServices.
func (r *Replica) clusterObjects() *clusterobjects.Keeper {
	return &clusterobjects.Keeper{Replica: r.cfg.Name, Cluster: r.cluster, API: r.api.server,
		Informers: r.api.informers, Kinds: r.api.kinds,
		CA: r.trust.ca, ReadyAPIs: r.members.Peers().ReadyAPIs, Log: r.log}
}
