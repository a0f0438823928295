// Package devices calls the DRA drivers of this node for ResourceClaims. Drivers prepare the
// devices of a claim before the containers of a pod are created, and unprepare them after the last
// pod of the claim has ended. Each request is stored on disk before the driver is called. Therefore
// the agent can unprepare all devices that no pod needs after a crash.
package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/keylock"
)

// Limits of the calls to DRA drivers and of the drivers' responses.
const (
	callLimit  = 45 * time.Second
	maxAnswer  = 1 << 20 // bytes
	maxDevices = 128     // devices of a claim
	maxCDI     = 64      // CDI device names of one device
	maxName    = 256     // bytes of a CDI device name and of any other name
)

// Config is the configuration of Devices, which prepares DRA devices.
type Config struct {
	Registration string // directory in which drivers register; "" = none
	State        string // directory for records
	Objects      agent.Objects
	Log          *slog.Logger // may be nil
}

var _ agent.Devices = (*Devices)(nil)

// Devices prepares the DRA devices of the claims of this node's pods. It implements agent.Devices.
type Devices struct {
	cfg   Config
	locks keylock.Locks // per claim
	// recordMu is held while a claim's devices are checked and recorded as in use.
	recordMu sync.Mutex
	records  *recordStore
	*driverRegistry
}

// New returns Devices. It starts nothing.
func New(cfg Config) *Devices {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	drivers := newRegistry(cfg.Registration, cfg.Log)
	return &Devices{cfg: cfg, records: newRecordStore(cfg.State, cfg.Log, drivers.notifier.Notify),
		driverRegistry: drivers}
}

// Prepare makes the drivers prepare the devices of all claims of a pod, and returns the devices. It
// is idempotent. It implements agent.Devices.
func (d *Devices) Prepare(ctx context.Context, pod *v1.Pod) (agent.ClaimedDevices, error) {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil, nil
	}
	out := agent.ClaimedDevices{}
	for i := range pod.Spec.ResourceClaims {
		entry := &pod.Spec.ResourceClaims[i]
		claim, err := d.findClaim(pod, entry)
		if err != nil {
			return nil, err
		}
		if claim == nil {
			continue
		}
		if out[entry.Name], err = d.prepareClaim(ctx, pod.UID, claim); err != nil {
			return nil, fmt.Errorf("preparing the devices of resourceclaim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
	}
	return out, nil
}

// findClaim returns the ResourceClaim of an entry in the pod's spec.resourceClaims. It returns an
// error unless the claim is allocated and reserved for the pod. It returns nil if the entry
// requires no claim.
func (d *Devices) findClaim(pod *v1.Pod, entry *v1.PodResourceClaim) (*resourcev1.ResourceClaim, error) {
	name, own, err := resourceclaim.Name(pod, entry)
	if err != nil || name == nil {
		return nil, err
	}
	claim, ok := d.cfg.Objects.ResourceClaim(pod.Namespace, *name)
	if !ok {
		return nil, fmt.Errorf("resourceclaim %q not found", *name)
	}
	if own {
		if err := resourceclaim.IsForPod(pod, claim, false); err != nil {
			return nil, err
		}
	}
	switch {
	case claim.Status.Allocation == nil:
		return nil, fmt.Errorf("resourceclaim %q has no devices yet", *name)
	case !resourceclaim.IsReservedForPod(pod, claim, false):
		return nil, fmt.Errorf("resourceclaim %q is not reserved for the pod", *name)
	}
	return claim, nil
}

func (d *Devices) prepareClaim(ctx context.Context, pod types.UID, claim *resourcev1.ResourceClaim) (
	[]agent.ClaimedDevice, error,
) {
	defer d.locks.Lock(string(claim.UID))()
	file := d.records.recordPath(claim.UID)
	r, err := d.recordUse(file, pod, claim)
	if err != nil {
		return nil, err
	}
	if r.Prepared {
		return r.Devices, nil
	}
	r.Devices = nil
	for _, name := range r.Drivers {
		got, err := d.prepareWithDriver(ctx, name, r)
		if err != nil {
			return nil, err
		}
		r.Devices = append(r.Devices, got...)
	}
	r.Prepared = true
	return r.Devices, d.records.writeRecord(file, r)
}

// recordUse records in the claim's record file that a pod uses the claim and its devices, and
// returns the record. The caller calls it before the first driver. It returns an error if another
// claim on this node holds one of the devices.
func (d *Devices) recordUse(file string, pod types.UID, claim *resourcev1.ResourceClaim) (*claimRecord, error) {
	d.recordMu.Lock()
	defer d.recordMu.Unlock()
	r, err := d.records.readRecord(claim.UID)
	if err != nil {
		return nil, err
	}
	if r == nil {
		r = &claimRecord{Version: recordVersion, Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			Drivers: claimDrivers(claim)}
	}
	if err := r.checkUnchanged(claim); err != nil {
		return nil, err
	}
	if r.Allotted == nil {
		if !r.Prepared { // a prepared record was written by an agent that did not store devices; it already holds them
			if err := d.checkFree(claim); err != nil {
				return nil, err
			}
		}
		r.Allotted = allocatedDevices(claim)
	}
	if !slices.Contains(r.Pods, pod) {
		r.Pods = append(r.Pods, pod)
	}
	return r, d.records.writeRecord(file, r)
}

// claimDrivers returns the names of the drivers of a claim's devices, sorted.
func claimDrivers(claim *resourcev1.ResourceClaim) []string {
	all := map[string]bool{}
	for i := range claim.Status.Allocation.Devices.Results {
		all[claim.Status.Allocation.Devices.Results[i].Driver] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// callDriver connects to a DRA driver and invokes call with a client of the driver.
func (d *Devices) callDriver(
	ctx context.Context, driver string, call func(context.Context, dra.DRAPluginClient) error,
) error {
	endpoint, err := d.findEndpoint(ctx, driver)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix://"+endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return fmt.Errorf("DRA driver %s: %w", driver, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if err := call(ctx, dra.NewDRAPluginClient(conn)); err != nil {
		return fmt.Errorf("DRA driver %s: %w", driver, err)
	}
	return nil
}

// prepareWithDriver makes a driver prepare its devices of the claim in record r, and returns the
// devices.
func (d *Devices) prepareWithDriver(ctx context.Context, driver string, r *claimRecord) (
	out []agent.ClaimedDevice, err error,
) {
	err = d.callDriver(ctx, driver, func(ctx context.Context, c dra.DRAPluginClient) error {
		res, err := c.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: []*dra.Claim{r.draClaim()}})
		if err != nil {
			return fmt.Errorf("NodePrepareResources: %w", err)
		}
		answer := res.GetClaims()[string(r.UID)]
		switch {
		case answer == nil:
			return errors.New("NodePrepareResources: the response does not contain the claim")
		case answer.GetError() != "":
			return fmt.Errorf("NodePrepareResources: %s", truncateText(answer.GetError()))
		}
		out, err = parseDevices(driver, answer.GetDevices())
		return err
	})
	return out, err
}

// parseDevices validates the devices in a driver's response and converts them.
func parseDevices(driver string, list []*dra.Device) ([]agent.ClaimedDevice, error) {
	if len(list) > maxDevices {
		return nil, fmt.Errorf("NodePrepareResources: %d devices: %d at most", len(list), maxDevices)
	}
	var out []agent.ClaimedDevice
	for _, dev := range list {
		if len(dev.GetCdiDeviceIds()) > maxCDI || len(dev.GetRequestNames()) > maxDevices {
			return nil,
				fmt.Errorf("NodePrepareResources: device %s has %d CDI names and %d requests: %d and %d at most",
					truncateText(dev.GetDeviceName()),
					len(dev.GetCdiDeviceIds()), len(dev.GetRequestNames()), maxCDI, maxDevices)
		}
		for _, id := range dev.GetCdiDeviceIds() {
			if _, _, _, err := parser.ParseQualifiedName(id); err != nil || len(id) > maxName {
				return nil,
					fmt.Errorf("NodePrepareResources: device %s: %q is not a CDI device name: want vendor/class=name",
						truncateText(dev.GetDeviceName()), truncateText(id))
			}
		}
		for _, name := range slices.Concat(dev.GetRequestNames(),
			[]string{dev.GetPoolName(), dev.GetDeviceName(), dev.GetShareId()}) {
			if len(name) > maxName {
				return nil, fmt.Errorf("NodePrepareResources: device %s: the name %q: %d bytes at most",
					truncateText(dev.GetDeviceName()), truncateText(name), maxName)
			}
		}
		out = append(out, agent.ClaimedDevice{Requests: dev.GetRequestNames(), CDI: dev.GetCdiDeviceIds(),
			Driver: driver, Pool: dev.GetPoolName(), Device: dev.GetDeviceName(), ShareID: dev.GetShareId()})
	}
	return out, nil
}

// truncateText limits the length of a driver's text, which may become part of an Event.
func truncateText(s string) string {
	const most = 512
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// Release makes the drivers unprepare the devices of those claims of the pod that no other pod of
// this node uses. It is idempotent. It implements agent.Devices.
func (d *Devices) Release(ctx context.Context, pod *v1.Pod) error {
	all, damaged, err := d.records.readAllRecords()
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range all {
		if slices.Contains(r.Pods, pod.UID) {
			errs = append(errs, d.releaseClaim(ctx, pod.UID, r.UID))
		}
	}
	for claim, why := range damaged {
		if d.mayConcern(claim, pod) {
			errs = append(errs, why)
		}
	}
	return errors.Join(errs...)
}

func (d *Devices) releaseClaim(ctx context.Context, pod, claim types.UID) error {
	defer d.locks.Lock(string(claim))()
	file := d.records.recordPath(claim)
	r, err := d.records.readRecord(claim)
	if err != nil || r == nil {
		return err
	}
	others := slices.DeleteFunc(slices.Clone(r.Pods), func(p types.UID) bool { return p == pod })
	if len(others) > 0 {
		r.Pods = others
		return d.records.writeRecord(file, r)
	}
	if r.Prepared { // a pod that starts in the meantime must prepare the devices again
		r.Prepared = false
		if err := d.records.writeRecord(file, r); err != nil {
			return err
		}
	}
	for _, name := range r.Drivers {
		err := d.callDriver(ctx, name, func(ctx context.Context, c dra.DRAPluginClient) error {
			res, err := c.NodeUnprepareResources(ctx,
				&dra.NodeUnprepareResourcesRequest{Claims: []*dra.Claim{r.draClaim()}})
			if err != nil {
				return fmt.Errorf("NodeUnprepareResources: %w", err)
			}
			answer := res.GetClaims()[string(r.UID)]
			switch {
			case answer == nil:
				return errors.New("NodeUnprepareResources: the response does not contain the claim")
			case answer.GetError() != "":
				return fmt.Errorf("NodeUnprepareResources: %s", truncateText(answer.GetError()))
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("unpreparing the devices of resourceclaim %s/%s: %w", r.Namespace, r.Name, err)
		}
	}
	return d.records.removeRecord(claim)
}
