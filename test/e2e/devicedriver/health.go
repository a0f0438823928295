package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
)

// NodeWatchResources implements the health service.
func (d *driver) NodeWatchResources(
	_ *drahealth.NodeWatchResourcesRequest, to grpc.ServerStreamingServer[drahealth.NodeWatchResourcesResponse],
) error {
	method, _ := grpc.MethodFromServerStream(to)
	if err := d.appendLog("watch %s", method); err != nil {
		return err
	}
	one := func(name, message string) *drahealth.NodeWatchResourcesResponse {
		return &drahealth.NodeWatchResourcesResponse{
			Devices: []*drahealth.DeviceHealth{{Device: &drahealth.DeviceIdentifier{PoolName: "w1", DeviceName: name},
				Message: message}}}
	}
	switch d.mode {
	case "health-floods":
		all := &drahealth.NodeWatchResourcesResponse{}
		for i := range 5000 {
			all.Devices = append(all.Devices, one(fmt.Sprint(i), "").Devices...)
		}
		return to.Send(all)
	case "health-huge":
		return to.Send(one("gpu-0", strings.Repeat("x", 5<<20)))
	case "health-nameless":
		return to.Send(one("", ""))
	case "health-raves":
		for i := 0; ; i++ {
			if err := to.Send(one("gpu-0", fmt.Sprint(i))); err != nil {
				return err
			}
		}
	}
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for said := ""; ; {
		b, err := os.ReadFile(d.health)
		if err != nil {
			return err
		}
		if string(b) != said {
			said = string(b)
			if err := to.Send(parseHealth(said)); err != nil {
				return err
			}
		}
		select {
		case <-to.Context().Done():
			return nil
		case <-t.C:
		}
	}
}

func parseHealth(lines string) *drahealth.NodeWatchResourcesResponse {
	out := &drahealth.NodeWatchResourcesResponse{}
	for line := range strings.Lines(lines) {
		f := strings.SplitN(strings.TrimSpace(line)+"   ", " ", 4)
		seconds, _ := strconv.ParseInt(f[2], 10, 64)
		out.Devices = append(out.Devices,
			&drahealth.DeviceHealth{Device: &drahealth.DeviceIdentifier{PoolName: "w1", DeviceName: f[0]},
				Health: drahealth.HealthStatus(drahealth.HealthStatus_value[f[1]]), HealthCheckTimeoutSeconds: seconds,
				Message: strings.TrimSpace(f[3])})
	}
	return out
}
