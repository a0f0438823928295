package devices

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"keelson.dev/keelson/internal/wait"
)

// Limits of the stream through which a DRA driver reports the health of its devices.
const (
	maxReport   = 4 << 20 // bytes of one report
	maxReported = 4096    // devices
	reportBurst = 10      // burst of reports; then one report per interval
	reportEvery = time.Second
	healthRetry = 5 * time.Second // delay after a stream has ended
)

// maintainConnection maintains a connection to a DRA driver until ctx ends, and reads the driver's
// health reports over it. The driver counts as available while the connection is established.
func (r *driverRegistry) maintainConnection(ctx context.Context, p *driverPlugin) {
	conn, err := grpc.NewClient("unix://"+p.endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReport)), grpc.WithIdleTimeout(0),
		grpc.WithMaxHeaderListSize(maxName*16),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond,
			Multiplier: 2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: time.Second}))
	if err != nil {
		r.log.Warn("the connection to a DRA driver cannot be maintained", "driver", p.name, "err", err)
		return
	}
	defer conn.Close()
	defer r.setConnected(p, false)
	r.serving.Go(func() { r.watchHealth(ctx, p, conn) })
	for {
		state := conn.GetState()
		r.setConnected(p, state == connectivity.Ready)
		if state == connectivity.Idle {
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// watchHealth reads the health reports of a driver, and opens a new stream when a stream ends. It
// returns if the driver does not implement the health service.
func (r *driverRegistry) watchHealth(ctx context.Context, p *driverPlugin, conn *grpc.ClientConn) {
	var client drahealth.DRAResourceHealthClient = drahealth.V1Alpha1ClientWrapper{
		Client: drahealthalpha.NewDRAResourceHealthClient(conn)}
	if slices.Contains(p.services, drahealth.DRAResourceHealthService) {
		client = drahealth.NewDRAResourceHealthClient(conn)
	}
	defer r.health.removePlugin(p)
	told := ""
	for {
		err := r.readReports(ctx, p, client)
		if ctx.Err() != nil || status.Code(err) == codes.Unimplemented {
			return
		}
		if why := truncateText(err.Error()); why != told {
			told = why
			r.log.Warn("a DRA driver's stream of device health failed and is opened again", "driver", p.name,
				"again in", healthRetry, "err", why)
		}
		if wait.Delay(ctx, healthRetry) != nil {
			return
		}
	}
}

// readReports reads one stream of health reports until it ends, and returns the error with which it
// ended. It delays reads from a driver that exceeds the rate limit.
func (r *driverRegistry) readReports(
	ctx context.Context, p *driverPlugin, client drahealth.DRAResourceHealthClient,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	left, since := reportBurst, time.Now()
	for {
		res, err := stream.Recv()
		if err != nil {
			return err
		}
		devices, err := parseHealth(res.GetDevices())
		if err != nil {
			return err
		}
		r.health.setReport(p, devices, time.Now())
		if earned := int(time.Since(since) / reportEvery); earned > 0 {
			left, since = min(reportBurst, left+earned), time.Now()
		}
		if left--; left <= 0 {
			if err := wait.Delay(ctx, reportEvery); err != nil {
				return err
			}
		}
	}
}

// parseHealth validates a driver's health report and returns the health of its devices.
func parseHealth(list []*drahealth.DeviceHealth) (map[deviceID]deviceHealth, error) {
	if len(list) > maxReported {
		return nil, fmt.Errorf("a report of %d devices: %d at most", len(list), maxReported)
	}
	out := make(map[deviceID]deviceHealth, len(list))
	for _, h := range list {
		d := deviceID{h.GetDevice().GetPoolName(), h.GetDevice().GetDeviceName()}
		if d.pool == "" || d.name == "" {
			return nil, errors.New("a report of a device without a pool or a name")
		}
		if len(d.pool) > maxName || len(d.name) > maxName {
			return nil, fmt.Errorf("a report of device %q of pool %q: names have at most %d bytes",
				truncateText(d.name), truncateText(d.pool), maxName)
		}
		out[d] = deviceHealth{status: statusOf(h.GetHealth()), message: truncateMessage(h.GetMessage()),
			validFor: reportLifetime(h.GetHealthCheckTimeoutSeconds())}
	}
	return out, nil
}
