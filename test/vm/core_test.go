package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// core is a pod with limits, a claim of the default class, and a process that does not end when it is asked to.
const core = `apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: core}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "trap '' TERM; echo begun; while true; do sleep 1; done"]
    resources: {requests: {cpu: 50m, memory: 16Mi}, limits: {cpu: 100m, memory: 32Mi}}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
`

// applyManifest applies a manifest.
func (c *vmCluster) applyManifest(name, manifest string) error {
	file := filepath.Join(c.TempDir(), name+".yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		return err
	}
	_, err := c.runKctl("apply", "-f", file)
	return err
}

// awaitOutput repeats a kctl command until it succeeds and prints want.
func (c *vmCluster) awaitOutput(want string, args ...string) error {
	return awaitCondition(func() error {
		out, err := c.runKctl(args...)
		if err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("the output of kctl %s is %q, want %q", strings.Join(args, " "), out, want)
		}
		return err
	})
}

// checkPod does a user's actions with one pod: its claim, its log, a command in it, a Service by
// its name.
func (c *vmCluster) checkPod() error {
	if err := c.applyManifest("core", core); err != nil {
		return err
	}
	return errors.Join(
		c.awaitOutput("True", "get", "pod", "core", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`),
		c.awaitOutput("standard Bound", "get", "pvc", "data", "-o",
			"jsonpath={.spec.storageClassName} {.status.phase}"),
		c.awaitOutput("begun", "logs", "core"),
		c.awaitOutput("kept", "exec", "core", "--", "sh", "-c", "echo kept >/data/file && sync && cat /data/file"),
		c.awaitOutput("Hello from Keelson", "exec", "core", "--", "wget", "-q", "-O-", "http://hello/"),
	)
}

// checkLimits reads the kernel's limits, and checks that a container that exceeds its memory limit
// is killed.
func (c *vmCluster) checkLimits() error {
	m := c.all["w1"]
	out, err := m.runCommand(`cd /sys/fs/cgroup/keelson.slice/pods/kubepods/burstable && for d in pod*/*/; do cat ` +
		`$d/memory.max $d/memory.oom.group $d/cpu.weight; done | sort | uniq -c | tr -s ' \n' ' '`)
	if err != nil {
		return err
	}
	if !strings.Contains(out, "3 67108864") || !strings.Contains(out, "4 1 ") {
		return fmt.Errorf("memory.max, memory.oom.group and cpu.weight of the example's containers, with how often: "+
			"%s: want 67108864 three times, and 1 four times", out)
	}
	group, err := c.podCgroup("core")
	if err != nil {
		return err
	}
	out, err = m.runCommand("cat " + group + "/*/cpu.max " + group + "/*/memory.max | sort -u | tr '\\n' ' '")
	if err != nil || !strings.Contains(out, "10000 100000") || !strings.Contains(out, "33554432") {
		return fmt.Errorf("cpu.max and memory.max of the pod core: %s: want 10000 100000 and 33554432 (%w)", out, err)
	}
	if err := c.applyManifest("hog", `apiVersion: v1
kind: Pod
metadata: {name: hog}
spec:
  restartPolicy: Never
  containers:
  - name: hog
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "x=x; while true; do x=$x$x; done"]
    resources: {limits: {memory: 32Mi}}
`); err != nil {
		return err
	}
	return c.awaitOutput("OOMKilled", "get", "pod", "hog", "-o",
		"jsonpath={.status.containerStatuses[0].state.terminated.reason}")
}

// podCgroup returns the folder of a pod's cgroup on the worker.
func (c *vmCluster) podCgroup(pod string) (string, error) {
	uid, err := c.runKctl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
	if err != nil {
		return "", err
	}
	out, err := c.all["w1"].runCommand("find /sys/fs/cgroup/keelson.slice -type d -name 'pod*" + uid + "*'")
	if err == nil && (out == "" || strings.Contains(out, "\n")) {
		err = fmt.Errorf("control groups of pod %s: %q, want one", pod, out)
	}
	return out, err
}

// checkForcedDeletion deletes pods that do not end by themselves: one with a process that ignores
// SIGTERM, and one that is frozen.
func (c *vmCluster) checkForcedDeletion() error {
	m := c.all["w1"]
	for _, name := range []string{"deaf", "frozen"} {
		if err := c.applyManifest(name, `apiVersion: v1
kind: Pod
metadata: {name: `+name+`}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "trap '' TERM; while true; do sleep 1; done"]
`); err != nil {
			return err
		}
		if err := c.awaitOutput("True", "get", "pod", name, "-o",
			`jsonpath={.status.conditions[?(@.type=="Ready")].status}`); err != nil {
			return err
		}
		group, err := c.podCgroup(name)
		if err != nil {
			return err
		}
		if name == "frozen" {
			if err := awaitCondition(func() error {
				_, err := m.runCommand("echo 1 >" + group + "/cgroup.freeze; grep -x 'frozen 1' " + group +
					"/cgroup.events")
				return err
			}); err != nil {
				return err
			}
		}
		if _, err := c.kctlFor(soon, "", "delete", "pod", name, "--server="+c.serverURL()); err != nil {
			return err
		}
		if err := awaitCondition(func() error {
			_, err := m.runCommand("! test -e " + group)
			return err
		}); err != nil {
			return fmt.Errorf("the control group of pod %s: %w", name, err)
		}
	}
	return nil
}
