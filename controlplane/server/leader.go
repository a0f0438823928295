package server

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
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
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

func (r *Replica) wireLeader(placing *config.Config) {
	client.Informer[*apiregistrationv1.APIService](r.informers) // see keepAPIServices
	d := controllers.Deps{
		Client: r.client, Informers: r.informers, Log: r.log.With("part", "controllers"),
		Timeline: r.timeline, Replica: r.cfg.Name, Now: time.Now,
		ConfirmLeadership: r.confirmLeadership, Aggregated: aggregatedAPIs{r}, PodAddresses: r.addresses,
	}
	r.engine = controllers.NewEngine(d, controllers.Options{Metrics: r.queues},
		deployment.New(d), replicaset.New(d), replicaset.NewForReplicationControllers(d), statefulset.New(d), daemonset.New(d), job.New(d), cronjob.New(d),
		endpointslice.New(d), endpointslice.NewMirror(d), endpoints.New(d),
		garbagecollector.New(d), namespace.New(d),
		nodelifecycle.New(d),
		nodecidr.New(d, nodecidr.Options{ClusterCIDR: r.cluster.ClusterCIDR}),
		servicecidr.New(d, r.cluster.ServiceCIDR), servicecidr.NewRepair(d), loadbalancer.New(d),
		persistentvolume.New(d), volumeprotection.New(d), podgroupprotection.New(d), volumeexpansion.New(d, lateStreams{r}), volumeattributes.New(d, lateStreams{r}), volumeprovision.New(d, lateStreams{r}), volumecapacity.New(d, lateStreams{r}), volumeattach.New(d, lateStreams{r}), volumesnapshot.New(d, lateStreams{r}), podgc.New(d, podgc.Options{}), disruption.New(d),
		serviceaccount.New(d, r.ca), serviceaccount.NewTokens(d, r.ca, r.secretToken), clusterroleaggregation.New(d),
		customresourcedefinition.New(d), resourcequota.New(d),
		horizontalpodautoscaler.New(d, r.autoscalerMetrics(), horizontalpodautoscaler.Defaults),
		ephemeralvolume.New(d), resourceclaim.New(d), resourceslice.New(d), devicetainteviction.New(d), configrestart.New(d), rebalance.New(d, rebalance.Options{Trial: r.trial, Interval: r.cfg.RebalanceInterval}),
		gateway.New(d, gateway.Options{Image: r.cfg.EntryImage}),
		ingress.New(d, ingress.Options{Image: r.cfg.EntryImage}),
		certificate.New(d, certificate.Options{Sign: r.ca.SignRequest, Reserved: pki.ReservedOrganizations()}),
	)
	r.scheduler = scheduler.New(scheduler.Config{
		Client:    r.client.As(api.User{Name: api.UserScheduler, Groups: []string{api.GroupAuthenticated}}),
		Informers: r.informers, Actor: "scheduler/" + r.cfg.Name, Timeline: r.timeline, Log: r.log.With("part", "scheduler"),
		Settings: placing, ConfirmLeadership: r.confirmLeadership,
	})
}

// confirmLeadership returns nil when a majority has confirmed, after the call began, that this replica leads in a term.
func (r *Replica) confirmLeadership(ctx context.Context, term uint64) error {
	return r.store.ConfirmLeadership(ctx, raftstore.Fence(term))
}

// trial is the cluster as the scheduler knows it, for who asks what would be.
func (r *Replica) trial() (rebalance.Trial, error) {
	t, err := r.scheduler.Trial()
	return trial{t}, err
}

type trial struct{ *scheduler.Trial }

// Weigh implements rebalance.Trial.
func (t trial) Weigh(ctx context.Context, p *v1.Pod) (rebalance.Verdict, error) {
	v, err := t.Trial.Weigh(ctx, p)
	return rebalance.Verdict(v), err
}

// secretToken makes the token that a Secret shall hold.
func (r *Replica) secretToken(account *v1.ServiceAccount, secret string) (string, error) {
	return r.tokens.SignForSecret(pki.SecretClaims{
		Namespace: account.Namespace, ServiceAccount: pki.Ref{Name: account.Name, UID: string(account.UID)}, Secret: secret,
	})
}

// lead does everything that only the leader does, until leadership ends. Each part is begun again by itself when it
// fails: leadership is raft's to take away, and what one part meets must not stop the others.
func (r *Replica) lead(ctx context.Context, fence raftstore.Fence) error {
	if r.cfg.guest != nil { // what is served is to stay as it is
		<-ctx.Done()
		return nil
	}
	began := time.Now()
	select {
	case <-r.api.CustomKinds(): // what is not served yet would be taken for gone
	case <-ctx.Done():
		return nil
	}
	if err := r.informers.WaitForSync(ctx); err != nil {
		return nil // leadership ended
	}
	term := uint64(fence)
	// On a new cluster the others need the default objects. They wait for the first attempt, not for its success. Where there
	// are some, nothing waits: what is missing of them is added beside the other work.
	if !r.hasDefaults() {
		r.firstDefaults(ctx, term)
	}
	r.log.Info("leading", "term", term, "after", time.Since(began))
	r.work.begin()
	defer r.work.end()
	lifecycle.Supervise(ctx, r.partFailed, r.leaderParts(term)...)
	return nil
}

// leaderParts are what only the leader does.
func (r *Replica) leaderParts(term uint64) []lifecycle.Part {
	system := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(term)
	parts := []lifecycle.Part{
		{Name: "default objects", Run: func(ctx context.Context) error { return r.keepDefaults(ctx, term) }},
		{Name: "founder tokens", Run: func(ctx context.Context) error { return r.storeFounderTokens(ctx, term) }},
		{Name: "scheduler", Run: func(ctx context.Context) error { return r.scheduler.Run(ctx, term) }},
		{Name: "fleet", Run: func(ctx context.Context) error { return r.fleet.RunLeader(ctx, system) }},
		{Name: "feature level", Run: func(ctx context.Context) error { return r.level.keep(ctx, raftstore.Fence(term)) }},
		{Name: "keys", Run: func(ctx context.Context) error { return r.keepKeys(ctx, raftstore.Fence(term)) }},
		{Name: "tokens in secrets", Run: func(ctx context.Context) error { return r.keepSecretTokens(ctx, term) }},
		{Name: "autopilot", Run: func(ctx context.Context) error { return r.keepVoters(ctx, system, raftstore.Fence(term)) }},
		{Name: "spent records", Run: func(ctx context.Context) error { return r.fleet.RunSweeper(ctx, system) }},
		{Name: "policy types", Run: func(ctx context.Context) error { return r.api.KeepPolicyTypes(ctx, term) }},
		{Name: "api services", Run: func(ctx context.Context) error { return r.keepAPIServices(ctx, term) }},
		{Name: "conditions of api services", Run: func(ctx context.Context) error { return r.keepConditions(ctx, term) }},
		{Name: "kubernetes service", Run: func(ctx context.Context) error { return r.keepKubernetesService(ctx, system, term) }},
	}
	if a := r.sharedAddress(); a != nil {
		parts = append(parts, lifecycle.Part{Name: "shared address", Run: a.Hold})
	}
	return append(parts, r.engine.Parts(term)...)
}

// partFailed tells of a part of the leader's work that is begun again.
func (r *Replica) partFailed(part string, err error, again time.Duration) {
	r.restarts.WithLabelValues(part).Inc()
	r.work.failed(part, err, again)
	r.log.Error("a part of the leader's work failed and is begun again", "part", part, "err", err, "after", again)
}

// defaultsPeriod is how often missing system namespaces and flow schemas are looked for; firstDefaults is given defaultsPatience.
const (
	defaultsPeriod   = time.Minute
	defaultsPatience = 10 * time.Second
)

func (r *Replica) firstDefaults(ctx context.Context, term uint64) {
	ctx, cancel := context.WithTimeout(ctx, defaultsPatience)
	defer cancel()
	if err := r.writeDefaults(ctx, term); err != nil && ctx.Err() == nil {
		r.log.Warn("not all default objects are written yet", "err", err)
	}
}

// writeDefaults writes the DNS Service last: where that is, the others have been tried.
func (r *Replica) writeDefaults(ctx context.Context, term uint64) error {
	return errors.Join(r.api.EnsureBootstrap(ctx, term), r.api.EnsureStorage(ctx, term), r.api.EnsureDNSService(ctx, term, r.cluster.DNSServiceIP()))
}

// hasDefaults says whether some leader has written the default objects before.
func (r *Replica) hasDefaults() bool {
	_, found, err := client.Informer[*v1.Service](r.informers).GetStore().GetByKey(metav1.NamespaceSystem + "/" + apiserver.DNSServiceName)
	return found && err == nil
}

// keepDefaults reconciles the default roles once, and keeps the system namespaces and the flow schemas.
func (r *Replica) keepDefaults(ctx context.Context, term uint64) error {
	if err := r.writeDefaults(ctx, term); err != nil {
		return fmt.Errorf("writing the default objects: %w", err)
	}
	for {
		if err := wait.Delay(ctx, defaultsPeriod); err != nil {
			return err
		}
		if err := errors.Join(r.api.EnsureSystemObjects(ctx, term), r.api.EnsureStorage(ctx, term), r.api.EnsureFlowControl(ctx, term), r.api.EnsureDNSService(ctx, term, r.cluster.DNSServiceIP())); err != nil {
			return fmt.Errorf("writing the default objects: %w", err)
		}
	}
}

// keepKubernetesService makes Service default/kubernetes follow the ready replicas, and what others do to it.
func (r *Replica) keepKubernetesService(ctx context.Context, system *client.Client, term uint64) error {
	touched, stop, err := r.watchKubernetesService()
	if err != nil {
		return err
	}
	defer stop()
	for {
		ready, changed := r.peers.readyAPIs()
		if len(ready) > 0 {
			if err := r.api.EnsureKubernetesService(ctx, term, r.cluster.APIServiceIP(), ready); err != nil {
				if errors.Is(err, apiserver.ErrAddressTaken) {
					r.tellAddressTaken(ctx, system, err)
				}
				return fmt.Errorf("writing Service default/kubernetes: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-touched:
		}
	}
}

// watchKubernetesService says when Service default/kubernetes, its EndpointSlice or its Endpoints change.
func (r *Replica) watchKubernetesService() (touched <-chan struct{}, stop func(), err error) {
	ch := make(chan struct{}, 1)
	tell := func(o any) {
		if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		if obj, ok := o.(api.Object); ok && obj.GetNamespace() == "default" && obj.GetName() == "kubernetes" {
			select {
			case ch <- struct{}{}:
			default:
			}
		}
	}
	var undo []func()
	stop = func() {
		for _, u := range undo {
			u()
		}
	}
	for _, inf := range []cache.SharedIndexInformer{
		client.Informer[*v1.Service](r.informers), client.Informer[*discoveryv1.EndpointSlice](r.informers), client.Informer[*v1.Endpoints](r.informers),
	} {
		reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: tell, UpdateFunc: func(_, o any) { tell(o) }, DeleteFunc: tell,
		})
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("watching Service default/kubernetes: %w", err)
		}
		undo = append(undo, func() { _ = inf.RemoveEventHandler(reg) })
	}
	return ch, stop, nil
}

// tellAddressTaken says in an Event why the API has no address within the cluster, once for as long as it is so.
func (r *Replica) tellAddressTaken(ctx context.Context, system *client.Client, why error) {
	now := metav1.Now()
	e := &v1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "kubernetes.address-taken"},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: metav1.NamespaceDefault, Name: "kubernetes"},
		Type:           v1.EventTypeWarning, Reason: "ClusterIPAlreadyAllocated", Message: why.Error(), Count: 1,
		FirstTimestamp: now, LastTimestamp: now, Source: v1.EventSource{Component: "keelson-controlplane", Host: r.cfg.Name},
	}
	if _, err := client.Create(ctx, system, e); err != nil && !apierrors.IsAlreadyExists(err) {
		r.log.Debug("event not written", "reason", e.Reason, "err", err)
	}
}

// storeFounderTokens records the first join tokens, which were made before there was a store. It ends with ctx.
func (r *Replica) storeFounderTokens(ctx context.Context, fence uint64) error {
	if err := r.recordFounderTokens(ctx, fence); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (r *Replica) recordFounderTokens(ctx context.Context, fence uint64) error {
	path := filepath.Join(r.cfg.DataDir, datadir.FounderFile)
	var f founder
	found, err := datadir.ReadJSON(path, &f)
	if err != nil || !found {
		return err
	}
	if len(f.Tokens) == 0 {
		return nil
	}
	for _, text := range f.Tokens {
		t, err := pki.ParseToken(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		g := pki.Grant{Expires: f.Expires, Uses: f.NodeUses, Note: "made with the cluster"}
		if t.Role == pki.RoleControlPlane {
			g.Expires, g.Uses = f.ReplicasUntil, f.ReplicaUses
		}
		if err := r.recordToken(ctx, fence, t, g); err != nil {
			return err
		}
	}
	// The file stays and marks the founder; the secrets in it go.
	if err := datadir.WriteJSON(path, founder{Expires: f.Expires}); err != nil {
		return err
	}
	r.pending.Store(false)
	return nil
}
