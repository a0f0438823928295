package kctl

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/kctl/restoretest"
	"keelson.dev/keelson/kctl/verb"
)

// servedBackup is the JSON that 'keelson-controlplane backup serve -o json' prints: the served
// backup, the address of its API, and a kubeconfig for it.
type servedBackup struct {
	Backup     api.ClusterBackup `json:"backup"`
	API        string            `json:"api"`
	Kubeconfig string            `json:"kubeconfig"`
}

// forwardedFlags are the names and help texts of the flags of 'kctl cluster restore-test' that are
// passed to 'keelson-controlplane backup serve'.
var forwardedFlags = [][2]string{
	{"encryption-keys", "key file that decrypts the backup (default: the key file of the replica on this machine)"},
	{"identity", "file with an age identity, for a backup that is encrypted with age"},
	{"data-dir", "data directory of the replica on this machine (default /var/lib/keelson/controlplane)"},
	{"work-dir", "directory to which the backup is unpacked for the duration of the test (default /var/tmp)"},
	{"backup-folder", "directory from which the newest backup is used if no FILE is given"},
	{"backup-cluster", "ID of the cluster whose newest backup is used (default: the cluster of the kubeconfig; " +
		"with --offline, that of the data directory)"},
	{"backup-s3", "S3 bucket from which the newest backup is used if no FILE is given, as s3://BUCKET/PREFIX"},
	{"backup-s3-endpoint", "URL of the S3 server of the backups"},
	{"backup-s3-region", "region of the S3 bucket of the backups"},
	{"backup-s3-credentials", "file with the access key for the S3 bucket of the backups"},
	{"backup-s3-ca", "file with the CA certificates that are trusted for the S3 server of the backups"},
	{"config", "configuration file with values for these flags (default /etc/keelson/controlplane.yaml)"},
}

func restoreTestCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "restore-test [FILE]",
		Short: "Test a backup: restore it on this machine and compare it with the cluster",
		Long: "Test a backup: restore it into a temporary replica on this machine's loopback address, and read\n" +
			"all of its objects. Without FILE, the newest backup is tested. The objects are compared with the\n" +
			"backup's own counts and with the cluster. An object that has not changed in the cluster since the\n" +
			"backup must be in the backup with the same content.\n" +
			"\n" +
			"SAME counts the objects that are equal. SINCE counts the objects that were created, changed or\n" +
			"deleted after the backup. The exit code is 0 if the backup is correct.\n" +
			"\n" +
			"The cluster is not changed, and the temporary replica is deleted at the end. If the command is\n" +
			"killed, the next call deletes it. The command reads all objects of the cluster, including Secrets.\n" +
			"It requires keelson-controlplane beside kctl or in $PATH, and a kubeconfig unless --offline is\n" +
			"given. It also requires the key of the backup: a copy of a replica's pki/store.keys for\n" +
			"--encryption-keys, or an age identity for --identity.",
		Example: "  # Test the newest backup\n" +
			"  kctl cluster restore-test\n" +
			"\n" +
			"  # Test a backup file\n" +
			"  kctl cluster restore-test /backups/today\n" +
			"\n" +
			"  # Create a backup now and test it\n" +
			"  kctl cluster restore-test --fresh\n" +
			"\n" +
			"  # Test a backup without access to the cluster\n" +
			"  kctl cluster restore-test /backups/today --offline",
		Args: cobra.MaximumNArgs(1),
	}
	for _, h := range forwardedFlags {
		c.Flags().String(h[0], "", h[1])
	}
	c.Flags().Bool("backup-s3-path-style", false,
		"put the name of the S3 bucket in the path of the URL, not in the host name")
	offline := c.Flags().Bool("offline", false,
		"compare the backup only with its own counts, without access to the cluster")
	fresh := c.Flags().Bool("fresh", false, "create a backup now and test it")
	output := outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		ctx, cancel := verb.WithSignals()
		defer cancel()
		if *fresh && (len(args) > 0 || *offline) {
			return errors.New("--fresh creates a backup of the running cluster: it cannot be used with " +
				"FILE or --offline")
		}
		var pass []string
		for _, h := range forwardedFlags {
			if fl := c.Flags().Lookup(h[0]); fl.Changed {
				pass = append(pass, "--"+h[0], fl.Value.String())
			}
		}
		if c.Flags().Changed("backup-s3-path-style") {
			pass = append(pass, "--backup-s3-path-style")
		}
		if *fresh {
			path, done, err := createTemporaryBackup(ctx, f, streams.ErrOut,
				diskheadroom.Target{Dir: cmp.Or(c.Flags().Lookup("work-dir").Value.String(), "/var/tmp"),
					ProtectedPath: cmp.Or(c.Flags().Lookup("data-dir").Value.String(), defaultDataDir)})
			if err != nil {
				return err
			}
			defer done()
			args = []string{path}
		}
		if len(args) == 0 && !*offline && !c.Flags().Changed("backup-cluster") {
			s, err := readClusterStatus(ctx, f)
			if err != nil {
				return err
			}
			pass = append(pass, "--backup-cluster", s.ID)
		}
		rows, err := runRestoreTest(ctx, f, streams.ErrOut, append(pass, args...), *offline)
		if err != nil {
			var stopped *verb.Interruption
			if errors.As(context.Cause(ctx), &stopped) {
				err = stopped
			}
			return err
		}
		if done, err := printJSON(streams.Out, *output, rows); done {
			return errors.Join(err, testResult(rows))
		}
		return errors.Join(restoretest.Print(streams.Out, rows), testResult(rows))
	}
	return c
}

// createTemporaryBackup requests a backup from a replica and writes it to a temporary file in
// disk.Dir. It returns the path of the file, and a function that removes the file. The file is
// locked while kctl runs. 'keelson-controlplane backup serve' removes unlocked files with the
// prefix api.TrialPrefix, which killed processes left.
func createTemporaryBackup(ctx context.Context, f cmdutil.Factory, progress io.Writer, disk diskheadroom.Target) (
	path string, remove func(), err error,
) {
	out, err := os.CreateTemp(disk.Dir, api.TrialPrefix) // it has mode 0600
	if err != nil {
		return "", nil, fmt.Errorf("--work-dir: %w", err)
	}
	remove = func() { _ = os.Remove(out.Name()); _ = out.Close() }
	if err = syscall.Flock(int(out.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		_, err = receiveBackup(ctx, f, nil, disk.Writer(out), progress)
	}
	if err != nil {
		remove()
		return "", nil, fmt.Errorf("creating a backup: %w", err)
	}
	return out.Name(), remove, nil
}

func testResult(rows []restoretest.Row) error {
	if restoretest.AllCorrect(rows) {
		return nil
	}
	return errors.New("the restore test failed: the restored objects differ from those that the backup should contain")
}

// runRestoreTest restores a backup into a temporary replica, and compares its objects with the
// cluster, kind by kind. args are the arguments of 'keelson-controlplane backup serve'. If offline
// is true, the objects are compared only with the counts in the backup.
func runRestoreTest(ctx context.Context, f cmdutil.Factory, progress io.Writer, args []string, offline bool) (
	[]restoretest.Row, error,
) {
	began := time.Now()
	child, s, err := startBackupServer(ctx, args)
	if err != nil {
		return nil, err
	}
	defer child.stop()
	made := time.UnixMilli(s.Backup.Created)
	fmt.Fprintf(progress, "backup of cluster %s at revision %d, %s: restored and served within %s\n",
		s.Backup.Cluster, s.Backup.Revision, formatAge(time.Since(made)), time.Since(began).Round(10*time.Millisecond))
	restored, err := newRESTClient(clientcmd.BuildConfigFromFlags("", s.Kubeconfig))
	if err != nil {
		return nil, err
	}
	var live rest.Interface
	if !offline {
		if live, err = newRESTClient(f.ToRESTConfig()); err != nil {
			return nil, err
		}
		if err := checkBackupOfCluster(ctx, f, s.Backup); err != nil {
			return nil, err
		}
	}
	var rows []restoretest.Row
	for _, k := range s.Backup.Kinds {
		if k.Resource == "" || k.Hidden {
			continue
		}
		rows = append(rows, compareKind(ctx, k, s.Backup.Revision, restored, live))
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	return rows, nil
}

// readClusterStatus returns the status of the cluster in the kubeconfig, with which a backup is
// compared. Its error suggests --offline.
func readClusterStatus(ctx context.Context, f cmdutil.Factory) (s api.ClusterStatus, err error) {
	if err := callAPIContext(ctx, f, "GET", api.PathClusterStatus, nil, &s); err != nil {
		return s,
			fmt.Errorf("reading the status of the cluster: %w: use --offline to test the backup without the cluster",
				err)
	}
	return s, nil
}

// checkBackupOfCluster returns an error if backup b is of another cluster, or if the cluster was
// restored from another backup in the meantime.
func checkBackupOfCluster(ctx context.Context, f cmdutil.Factory, b api.ClusterBackup) error {
	s, err := readClusterStatus(ctx, f)
	if err != nil {
		return err
	}
	switch {
	case s.ID != b.Cluster:
		return fmt.Errorf("the backup is of cluster %s, and the kubeconfig is for %s: use --offline, or another "+
			"kubeconfig", b.Cluster, s.ID)
	case s.Revision < b.Revision || s.Revision > b.Revision+1<<32:
		return fmt.Errorf("the backup has revision %d and the cluster has revision %d: the cluster was "+
			"restored from another "+
			"backup in the meantime; use --offline", b.Revision, s.Revision)
	}
	return nil
}

func newRESTClient(cfg *rest.Config, err error) (rest.Interface, error) {
	if err != nil {
		return nil, err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Timeout, cfg.WarningHandler = -1, time.Minute, rest.NoWarnings{}
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	return cs.RESTClient(), nil
}

// compareKind lists the objects of kind k in the restored backup and in the cluster, and compares
// them. revision is the revision of the backup. live is nil with --offline; then only the counts
// are compared.
func compareKind(
	ctx context.Context, k api.ClusterBackupKind, revision uint64, restored, live rest.Interface,
) restoretest.Row {
	name := k.Resource
	path := "/api/" + k.Version + "/" + k.Resource
	if k.Group != "" {
		name += "." + k.Group
		path = "/apis/" + k.Group + "/" + k.Version + "/" + k.Resource
	}
	one := restoretest.Kind{Name: name, Held: k.Objects, Expiring: k.Expiring}
	problem := func(where string, err error) {
		if one.Problem == "" {
			one.Problem = fmt.Sprintf("listing it %s: %v", where, err)
		}
	}
	var err error
	if one.Restored, err = listObjects(ctx, restored, name, path); err != nil {
		problem("in the restored store", err)
	}
	if live != nil {
		switch one.Live, err = listObjects(ctx, live, name, path); {
		case apierrors.IsNotFound(err): // the CustomResourceDefinition was deleted after the backup
			one.Live = map[string]restoretest.Object{}
		case err != nil:
			problem("in the cluster", err)
		}
	}
	return restoretest.Compare(one, revision)
}

// Limits for reading a list: the objects per page, and the number of pages.
const (
	testPageSize = 250
	maxListPages = 40_000
)

// listObjects reads all objects at an API path, page by page, and returns them by namespace/name.
// If the continue token has expired, it starts the list again, at most twice. resource is the name
// of the resource, such as deployments.apps.
func listObjects(ctx context.Context, c rest.Interface, resource, path string) (
	out map[string]restoretest.Object, err error,
) {
	for range 3 {
		if out, err = listObjectsOnce(ctx, c, resource, path); !apierrors.IsResourceExpired(err) {
			break
		}
	}
	return out, err
}

func listObjectsOnce(ctx context.Context, c rest.Interface, resource, path string) (
	map[string]restoretest.Object, error,
) {
	out := map[string]restoretest.Object{}
	next := ""
	for range maxListPages {
		q := url.Values{"limit": {fmt.Sprint(testPageSize)}}
		if next != "" {
			q.Set("continue", next)
		}
		raw, err := c.Get().RequestURI(path+"?"+q.Encode()).SetHeader("Accept", "application/json").Do(ctx).Raw()
		if err != nil {
			return nil, err
		}
		var page struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []json.RawMessage `json:"items"`
		}
		if err := json.Unmarshal(raw, &page); err != nil {
			return nil, fmt.Errorf("reading %s: unexpected response: %w", resource, err)
		}
		for _, item := range page.Items {
			name, o, err := restoretest.ParseItem(resource, item)
			if err != nil {
				return nil, err
			}
			out[name] = o
		}
		if next = page.Metadata.Continue; next == "" {
			return out, nil
		}
	}
	return nil, fmt.Errorf("the list of %s does not end after %d pages", resource, maxListPages)
}

// serveProcess is a child process 'keelson-controlplane backup serve'. It exits when its standard
// input is closed, so that it also exits if kctl is killed.
type serveProcess struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func (s *serveProcess) stop() {
	s.stdin.Close()
	gone := time.AfterFunc(time.Minute, func() { _ = s.cmd.Process.Kill() })
	defer gone.Stop()
	_ = s.cmd.Wait() // its exit code does not matter after the comparison
}

// maxServeOutput is the maximum size of the line of JSON that 'keelson-controlplane backup serve'
// prints. Each kind takes about 150 bytes.
const maxServeOutput = 4 << 20

// startBackupServer starts 'keelson-controlplane backup serve' with the arguments args, and waits
// until it serves the backup. The caller stops the returned process.
func startBackupServer(ctx context.Context, args []string) (*serveProcess, servedBackup, error) {
	program, err := findDaemonProgram()
	if err != nil {
		return nil, servedBackup{}, err
	}
	cmd := exec.CommandContext(ctx, program, append([]string{"backup", "serve", "-o", "json", "--until-stdin-ends"},
		args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	var said bytes.Buffer
	cmd.Stderr = &limitedWriter{w: &said, left: 64 << 10}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, servedBackup{}, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, servedBackup{}, err
	}
	if err := cmd.Start(); err != nil {
		return nil, servedBackup{}, err
	}
	s := &serveProcess{cmd: cmd, stdin: stdin}
	line, err := bufio.NewReader(io.LimitReader(stdout, maxServeOutput)).ReadBytes('\n')
	if err != nil {
		stdin.Close()
		if ended := cmd.Wait(); ended != nil && ctx.Err() == nil {
			return nil, servedBackup{}, fmt.Errorf("the backup cannot be served: %s",
				withKeyHint(lastOutputLine(said.String(), ended)))
		}
		return nil, servedBackup{}, cmp.Or(context.Cause(ctx), err)
	}
	var out servedBackup
	if err := json.Unmarshal(line, &out); err != nil {
		s.stop()
		return nil, servedBackup{}, fmt.Errorf("unexpected output of 'keelson-controlplane backup serve': %w", err)
	}
	return s, out, nil
}

// findDaemonProgram returns the path of keelson-controlplane in the directory of kctl, or else in
// $PATH. It fails if there is no such program.
func findDaemonProgram() (string, error) {
	beside := daemonProgram()
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	if path, err := exec.LookPath(filepath.Base(beside)); err == nil {
		return path, nil
	}
	return "",
		fmt.Errorf("a restore test requires the program keelson-controlplane, which is neither %s nor in "+
			"$PATH: copy the "+
			"program of the cluster's release to this machine, and set the key file of the backup with "+
			"--encryption-keys or --identity", beside)
}

// withKeyHint returns message, an error text of 'keelson-controlplane backup serve'. If message is
// about a missing key of the backup, withKeyHint appends where to find the key.
func withKeyHint(message string) string {
	if !strings.Contains(message, "no key file is set") {
		return message
	}
	return message + "; copy " + defaultDataDir + "/pki/store.keys from a replica of that cluster and name the copy"
}

// lastOutputLine returns the last line of output, which a program printed, without the program's
// name. If there is no output, it returns the text of exitErr, the program's exit error.
func lastOutputLine(output string, exitErr error) string {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	return cmp.Or(strings.TrimPrefix(lines[len(lines)-1], "keelson-controlplane: "), exitErr.Error())
}

// limitedWriter writes to w until it has written the initial value of left, in bytes. It discards
// all later bytes.
type limitedWriter struct {
	w    io.Writer
	left int
}

// Write writes at most b.left bytes of p to b.w, and discards the rest without an error.
func (b *limitedWriter) Write(p []byte) (int, error) {
	n := min(len(p), b.left)
	b.left -= n
	if _, err := b.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}
