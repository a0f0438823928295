package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"keelson.dev/keelson/internal/wait"
)

// registeredPlugin is one registration of a device plugin.
type registeredPlugin struct {
	resource string
	endpoint string
	stop     context.CancelFunc

	// set by watchDevices before the first device list
	client  api.DevicePluginClient
	options *api.DevicePluginOptions

	numa map[string][]int64 // NUMA nodes of the devices in the last list; protected by the Manager's lock
}

// Limits of the rate at which a device plugin may send device lists: a burst, and then one list per
// interval. A plugin that sends more must wait, because each list may update the Node.
const (
	listsAtOnce = 10
	listEvery   = time.Second
)

// watchDevices connects to a plugin and processes its device lists until the stream of lists ends.
// It returns the error with which the stream ended.
func (m *Manager) watchDevices(ctx context.Context, p *registeredPlugin) error {
	conn, err := grpc.NewClient("unix://"+p.endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)), grpc.WithMaxHeaderListSize(maxText),
		// a plugin may start to serve after it has registered
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond,
			Multiplier: 2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second}))
	if err != nil {
		return err
	}
	defer conn.Close()
	p.client = api.NewDevicePluginClient(conn)
	if err := p.fetchOptions(ctx, m.cfg.QueryLimit); err != nil {
		return err
	}
	stream, err := p.client.ListAndWatch(ctx, &api.Empty{}, grpc.MaxCallRecvMsgSize(maxList))
	if err != nil {
		return fmt.Errorf("ListAndWatch: %w", err)
	}
	left, since := listsAtOnce, time.Now()
	for {
		res, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("ListAndWatch: %w", err)
		}
		devices, err := parseDevices(res.GetDevices())
		if err != nil {
			return fmt.Errorf("ListAndWatch: %w", err)
		}
		m.setDevices(p, devices, numaNodes(res.GetDevices()))
		if earned := int(time.Since(since) / listEvery); earned > 0 {
			left, since = min(listsAtOnce, left+earned), time.Now()
		}
		if left--; left <= 0 {
			if err := wait.Delay(ctx, listEvery); err != nil {
				return err
			}
		}
	}
}

// fetchOptions waits until the plugin responds, at most for the duration limit. It stores the
// plugin's options, unless the registration contained them.
func (p *registeredPlugin) fetchOptions(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	got, err := p.client.GetDevicePluginOptions(ctx, &api.Empty{}, grpc.WaitForReady(true))
	switch {
	case status.Code(err) == codes.Unimplemented:
		got = &api.DevicePluginOptions{}
	case err != nil:
		return fmt.Errorf("GetDevicePluginOptions: %w", err)
	}
	if p.options == nil {
		p.options = got
	}
	return nil
}

// parseDevices validates a plugin's device list. It returns whether each device is healthy, by
// device ID.
func parseDevices(list []*api.Device) (map[string]bool, error) {
	if len(list) > maxDevices {
		return nil, fmt.Errorf("%d devices: a plugin may have at most %d", len(list), maxDevices)
	}
	out := make(map[string]bool, len(list))
	for _, d := range list {
		id := d.GetID()
		switch _, twice := out[id]; {
		case id == "":
			return nil, errors.New("a device has no name")
		case len(id) > maxID || !utf8.ValidString(id):
			return nil, fmt.Errorf("device %q: IDs have at most %d bytes of UTF-8", truncateText(id), maxID)
		case twice:
			return nil, fmt.Errorf("device %q is listed twice", id)
		}
		out[id] = d.GetHealth() == api.Healthy
	}
	return out, nil
}

// numaNodes returns the NUMA nodes of the devices in a plugin's list, by device ID.
func numaNodes(list []*api.Device) map[string][]int64 {
	out := map[string][]int64{}
	for _, d := range list {
		for _, n := range d.GetTopology().GetNodes() {
			if len(out[d.ID]) < maxNodes {
				out[d.ID] = append(out[d.ID], n.GetID())
			}
		}
	}
	return out
}
